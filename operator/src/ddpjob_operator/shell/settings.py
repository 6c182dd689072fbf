"""Read every flag and environment variable of the operator, in this one file.

__main__.py parses them, app.py hands them out. Flags win over the environment. Only what a pod
learns about itself (POD_NAME, POD_NAMESPACE) and KUBECONFIG come from the environment, as in every
Kubernetes tool.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddpjob_operator import __version__
from ddpjob_operator.core.objects.json_read import mapping
from ddpjob_operator.core.objects.nodes import NO_SIGNALS, Signals, signals_of


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of this process; durations are in seconds."""

    namespaces: tuple[str, ...] = ()  # empty: the whole cluster
    workers: int = 8
    progress_seconds: float = 15.0
    resync_seconds: float = 30.0
    metrics_from: tuple[dict[str, Any], ...] = ()  # NetworkPolicyPeers; empty: everybody
    node_signals: Signals = NO_SIGNALS  # none: no node is known to be about to go
    probe_host: str = ""  # every address, of IPv4 and of IPv6
    probe_port: int = 8080
    lease_name: str = "ddpjob-operator"
    lease_namespace: str = ""  # empty: the namespace of the credentials
    lease_seconds: float = 15.0
    identity: str = ""
    log_level: str = "info"
    log_format: str = "text"
    kubeconfig: str = ""  # empty: in-cluster, else the default file
    context: str = ""


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Parse flags and environment; exit with status 2 and a message on a bad flag."""
    defaults = Settings(
        identity=_identity(environ),
        lease_namespace=environ.get("POD_NAMESPACE", ""),
        kubeconfig=environ.get("KUBECONFIG", ""),
    )
    return Settings(**vars(_parser(defaults).parse_args(argv)))


def _identity(environ: Mapping[str, str]) -> str:
    """Choose the holder name in the Lease.

    A pod's name is enough, because the kubelet never runs two incarnations of one container at
    once; so a restarted container takes its own lease back without waiting for it to expire.
    """
    return environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}"


def _parser(defaults: Settings) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddpjob-operator",
        description="Runs DDPJob objects: gangs of pods that train with PyTorch DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    scope = parser.add_argument_group("what it serves")
    scope.add_argument(
        "--namespaces",
        type=_names,
        metavar="A,B",
        help="serve only these namespaces; empty serves the whole cluster",
    )
    scope.add_argument("--workers", type=_at_least_one, help="DDPJobs that are worked on at once")
    scope.add_argument(
        "--progress-seconds",
        type=_positive,
        metavar="S",
        help="read each running job's progress at most every S seconds",
    )
    scope.add_argument(
        "--resync-seconds",
        type=_positive,
        metavar="S",
        help="list all DDPJobs every S seconds, to find those that vanished while a watch was down",
    )
    scope.add_argument(
        "--metrics-from",
        type=_peers,
        metavar="JSON",
        help="a list of NetworkPolicyPeers: only they, the operator must be one, and the gang may"
        " reach a gang's metrics port; empty lets everybody",
    )
    scope.add_argument(
        "--node-signals",
        type=_signals,
        metavar="JSON",
        help='{"conditions": [...], "taints": [...], "cordon": false}: what says that a node is'
        " about to go; pods there are replaced before they are lost",
    )
    _cluster_flags(parser)
    _process_flags(parser)
    parser.set_defaults(**{field.name: getattr(defaults, field.name) for field in fields(defaults)})
    return parser


def _cluster_flags(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="credentials; without it those of the pod's ServiceAccount, else ~/.kube/config",
    )
    cluster.add_argument("--context", help="a context of the kubeconfig")
    cluster.add_argument(
        "--lease-name",
        help="of several operators with the same lease one acts and the others stand by",
    )
    cluster.add_argument(
        "--lease-namespace",
        metavar="NS",
        help="where the lease lies; empty takes the namespace of the credentials",
    )
    cluster.add_argument(
        "--lease-seconds",
        type=_positive,
        metavar="S",
        help="how long a dead leader's lease holds the others back",
    )


def _process_flags(parser: argparse.ArgumentParser) -> None:
    process = parser.add_argument_group("the process")
    process.add_argument("--probe-host", help="address of /healthz, /readyz and /metrics (all)")
    process.add_argument("--probe-port", type=int, help="their port; 0 takes any free one")
    process.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="the least important lines to write",
    )
    process.add_argument(
        "--log-format", choices=("text", "json"), help="for people or for machines"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in (name.strip() for name in text.split(",")) if part)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below 86400 seconds")
    return value


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
    told = {name: _without_empty(member) for name, member in value.items()}
    return {
        name: member
        for name, member in told.items()
        if member not in (None, [], {}) or (member == {} and name.endswith("Selector"))
    }


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
