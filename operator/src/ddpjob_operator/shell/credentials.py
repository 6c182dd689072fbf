"""The API server's address and our credentials, as `kubernetes.config` finds them.

api.py and kopf's login ask for them. In a pod the ServiceAccount's token file, which the kubelet
rotates, is read again every minute; exec plugins of a kubeconfig run again when their token is
about to expire.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoCredentialsError(Exception):
    """Neither a kubeconfig nor a ServiceAccount was found, or it cannot be read."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The fixed part of the credentials: addresses and files, no tokens."""

    server: str
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    verify: bool
    server_name: str | None
    proxy: str | None
    namespace: str


class Credentials:
    """Credentials, loaded once; ``authorization()`` stays fresh. Safe for several threads."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        self._configuration = configuration
        self._lock = threading.Lock()
        self.endpoint = Endpoint(
            server=configuration.host.rstrip("/"),
            ca_file=configuration.ssl_ca_cert,
            cert_file=configuration.cert_file,
            key_file=configuration.key_file,
            verify=configuration.verify_ssl,
            server_name=configuration.tls_server_name,
            proxy=configuration.proxy,
            namespace=namespace,
        )

    @classmethod
    def load(cls, kubeconfig: str = "", context: str = "") -> Credentials:
        """Load from the named kubeconfig, else in-cluster, else from ~/.kube/config.

        Raises NoCredentialsError with what to do about it.
        """
        configuration = kubernetes.client.Configuration()
        try:
            if not kubeconfig:
                try:
                    _load_incluster(configuration)
                except kubernetes.config.ConfigException:
                    pass
                else:
                    return cls(configuration, _NAMESPACE_FILE.read_text().strip() or "default")
            _load_kubeconfig(kubeconfig, context, configuration)
            contexts, current = _contexts(kubeconfig)
            chosen = next((c for c in contexts if c["name"] == context), current)
            return cls(configuration, chosen["context"].get("namespace") or "default")
        except (kubernetes.config.ConfigException, OSError) as error:
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
        if not found:
            return None
        scheme, _, token = found.strip().partition(" ")
        return f"{scheme.capitalize()} {token}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Make the context for https; None for a plain http server (a local proxy)."""
        endpoint = self.endpoint
        if not endpoint.server.startswith("https"):
            return None
        context = ssl.create_default_context(cafile=endpoint.ca_file)
        if not endpoint.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if endpoint.cert_file:
            context.load_cert_chain(endpoint.cert_file, endpoint.key_file)
        return context


# The package has types for its generated client, but none for its configuration.


def _load_incluster(configuration: Any) -> None:
    kubernetes.config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]


def _load_kubeconfig(path: str, context: str, configuration: Any) -> None:
    kubernetes.config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=path or None,
        context=context or None,
        client_configuration=configuration,
        persist_config=False,
    )


def _contexts(path: str) -> Any:
    return kubernetes.config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
        path or None
    )
