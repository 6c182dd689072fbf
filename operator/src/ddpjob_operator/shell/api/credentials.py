"""Find the API server's address and our credentials, as `kubernetes.config` does.

client.py and kopf's login ask for them. In a pod the ServiceAccount's token file, which the kubelet
rotates, is read again every minute; exec plugins of a kubeconfig run again when their token is
about to expire.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
from kubernetes.config import ConfigException

_config: Any = kubernetes.config  # it has types for its generated client only
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoCredentialsError(Exception):
    """Neither a kubeconfig nor a ServiceAccount was found, or it cannot be read."""


class Credentials:
    """Credentials, loaded once; ``authorization()`` stays fresh. Safe for several threads."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        self._configuration = configuration
        self._lock = threading.Lock()
        self.server: str = configuration.host.rstrip("/")
        self.server_name: str | None = configuration.tls_server_name
        self.proxy: str | None = configuration.proxy
        self.namespace = namespace

    @classmethod
    def load(cls, kubeconfig: str = "", context: str = "") -> Credentials:
        """Load from the named kubeconfig, else in-cluster, else from ~/.kube/config.

        Raises NoCredentialsError with what to do about it.
        """
        configuration = kubernetes.client.Configuration()
        try:
            if not kubeconfig:
                with contextlib.suppress(ConfigException):
                    _config.load_incluster_config(configuration)
                    return cls(configuration, _NAMESPACE_FILE.read_text().strip() or "default")
            path = kubeconfig or None
            _config.load_kube_config(path, context or None, configuration, persist_config=False)
            contexts, current = _config.list_kube_config_contexts(path)
            chosen = next((c for c in contexts if c["name"] == context), current)
            return cls(configuration, chosen["context"].get("namespace") or "default")
        except (ConfigException, OSError) as error:
            raise NoCredentialsError(
                f"no credentials for a cluster: {error}. "
                "Set --kubeconfig, or run in a pod that has a ServiceAccount."
            ) from error

    def authorization(self) -> str | None:
        """Return the Authorization header, or None with a client certificate."""
        with self._lock:
            found: str | None = self._configuration.get_api_key_with_prefix(
                "BearerToken", alias="authorization"
            )
        return found.strip() if found else None

    def ssl_context(self) -> ssl.SSLContext | None:
        """Make the context for https; None for a plain http server (a local proxy)."""
        if not self.server.startswith("https"):
            return None
        given = self._configuration
        context = ssl.create_default_context(cafile=given.ssl_ca_cert)
        if not given.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if given.cert_file:
            context.load_cert_chain(given.cert_file, given.key_file)
        return context
