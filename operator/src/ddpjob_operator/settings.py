"""Read every flag, environment variable and credential of the operator, in this one file.

__main__.py parses them, app.py hands them out. Flags win over the environment. Only what a pod
learns about itself (POD_NAME, POD_NAMESPACE) and KUBECONFIG come from the environment, as in every
Kubernetes tool. Credentials are found as `kubernetes.config` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
from kubernetes.config import ConfigException

from ddpjob_operator import __version__
from ddpjob_operator.core.objects.json_read import mapping
from ddpjob_operator.core.objects.nodes import NO_SIGNALS, Signals, signals_of

_config: Any = kubernetes.config  # it has types for its generated client only
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in (name.strip() for name in text.split(",")) if part)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below 86400 seconds")
    return value


def _boolean(given: str) -> bool:
    if given not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{given} is neither true nor false")
    return given == "true"


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    try:
        found = _without_empty(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(peer, dict) and peer for peer in found):
        raise argparse.ArgumentTypeError(
            'not a list of NetworkPolicyPeers, as in [{"podSelector": {...}}]'
        )
    return tuple(found)


def _signals(given: str) -> Signals:
    try:
        return signals_of(mapping(json.loads(given)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None


def _without_empty(value: Any) -> Any:
    """Drop members that the API server drops: each look would find them missing, and write.

    An empty selector is kept, there and here: it selects everything.
    """
    if isinstance(value, list):
        return [_without_empty(one) for one in value]
    if not isinstance(value, dict):
        return value
    full = {name: _without_empty(member) for name, member in value.items()}
    return {
        name: member
        for name, member in full.items()
        if member not in (None, [], {}) or (member == {} and name.endswith("Selector"))
    }


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _flag(default: Any, words: str, read: Callable[[str], Any] = str, **more: Any) -> Any:
    """Declare a setting that has a flag; ``more``: further arguments of add_argument()."""
    return field(default=default, metadata={"help": words, "type": read, **more})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of this process; durations are in seconds."""

    namespaces: tuple[str, ...] = _flag(
        (), "serve only these namespaces; empty serves the whole cluster", _names, metavar="A,B"
    )
    workers: int = _flag(8, "DDPJobs that are worked on at once", _at_least_one)
    progress_seconds: float = _flag(
        15.0, "read each running job's progress at most every S seconds", _positive, metavar="S"
    )
    resync_seconds: float = _flag(
        30.0,
        "list all DDPJobs every S seconds, to find those that vanished while a watch was down",
        _positive,
        metavar="S",
    )
    metrics_from: tuple[dict[str, Any], ...] = _flag(
        (),
        "the NetworkPolicyPeers that may reach a gang's metrics port, beside the gang itself; the"
        " operator must be among them; empty: everybody",
        _peers,
        metavar="JSON",
    )
    node_signals: Signals = _flag(
        NO_SIGNALS,
        '{"conditions": [...], "taints": [...], "cordon": false}: what says that a node is about to'
        " go; pods there are replaced before they are lost",
        _signals,
        metavar="JSON",
    )
    kueue: bool = _flag(
        False,
        "true: jobs with the label kueue.x-k8s.io/queue-name wait for their Workload's admission",
        _boolean,
        metavar="BOOL",
    )
    kubeconfig: str = _flag(
        "",
        "credentials; without it those of the pod's ServiceAccount, else ~/.kube/config",
        metavar="FILE",
    )
    context: str = _flag("", "a context of the kubeconfig")
    lease_name: str = _flag(
        "ddpjob-operator",
        "of several operators with the same lease only one acts",
    )
    lease_namespace: str = _flag(
        "", "where the lease lies; empty takes the namespace of the credentials", metavar="NS"
    )
    lease_seconds: float = _flag(
        15.0, "after so long another operator takes over from a dead one", _positive, metavar="S"
    )
    probe_host: str = _flag("", "address of /healthz, /readyz and /metrics (all)")
    probe_port: int = _flag(8080, "their port; 0 takes any free one", int)
    log_level: str = _flag(
        "info", "the least important lines to write", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _flag("text", "for people or for machines", choices=("text", "json"))
    identity: str = ""


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Parse flags and environment; exit with status 2 and a message on a bad flag."""
    parser = argparse.ArgumentParser(
        prog="ddpjob-operator",
        description="Runs DDPJob objects: gangs of pods that train with PyTorch DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    for one in fields(Settings):
        if one.metadata:
            flag = "--" + one.name.replace("_", "-")
            parser.add_argument(flag, default=one.default, **one.metadata)
    parser.set_defaults(
        # A pod's name is enough: the kubelet never runs two incarnations of one container at once,
        # so a restarted one takes its own lease back without waiting for it to expire.
        identity=environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        lease_namespace=environ.get("POD_NAMESPACE", ""),
        kubeconfig=environ.get("KUBECONFIG", ""),
    )
    return Settings(**vars(parser.parse_args(argv)))


class NoCredentialsError(Exception):
    """Neither a kubeconfig nor a ServiceAccount was found, or it cannot be read."""


class Credentials:
    """Credentials, loaded once; ``authorization()`` stays fresh. Safe for several threads.

    In a pod the ServiceAccount's token file, which the kubelet rotates, is read again every minute;
    exec plugins of a kubeconfig run again when their token is about to expire.
    """

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
