"""Define records of a job's nodes: ready, silent and since when, gone, or about to go.

shell/nodes.py fills these records, since a Node object is 10 KiB and more; plan() reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ddpjob_operator.core.objects.json_read import mapping, parse_time, sequence, text

#: An administrator's statement that the machine is off: Kubernetes then lets go of its pods.
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
_CONTROL_PLANE: Final = "node-role.kubernetes.io/control-plane"
#: --unhealthy-zone-threshold of kube-controller-manager, which holds for more than two nodes.
_UNHEALTHY_SHARE: Final = 0.55
_FEW: Final = 2


@dataclass(frozen=True, slots=True)
class Signals:
    """What says that a node is about to go: the chart's value nodeSignals.

    ``conditions``: types that are then True, or ``type=status``; ``taints``: keys.
    """

    conditions: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    cordon: bool = False


NO_SIGNALS: Final = Signals()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The part of a Node object that is kept.

    ``since``: the last transition of its Ready condition by the cluster's clock, so only good to
    tell one transition from another.
    """

    name: str
    ready: bool
    since: datetime | None
    out_of_service: bool = False
    control_plane: bool = False  # tainted so: work goes elsewhere
    signal: str = ""  # the first of Signals that it shows, in words


@dataclass(frozen=True, slots=True)
class Lease:
    """The age of a Lease, in seconds on this process' clock, up to the last list of all.

    ``unrenewed``: since the Lease was first listed as it is. ``behind``: since another node's was
    first listed with news after that; 0: none was.
    """

    unrenewed: float = 0.0
    behind: float = 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """One node in one planning round.

    ``down_seconds``: for how long this process has seen that it is not ready. ``read_seconds``: the
    age of the last quorum read; None if only a watch has shown it. ``guessed``: only a pod names it
    so far, no list and no watch. ``since``: NodeRecord's.
    """

    name: str
    exists: bool = True
    ready: bool = True
    out_of_service: bool = False
    down_seconds: float = 0.0
    read_seconds: float | None = None
    guessed: bool = False
    signal: str = ""
    lease: Lease = Lease()
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes with a job's pods, by name, and counts of the cluster's workers.

    ``calm_seconds``: for how long the cluster has not been disrupted. ``leases_seconds``: the age
    of the last list of their Leases.
    """

    workers: int
    unready: int
    calm_seconds: float = math.inf
    known: Mapping[str, Node] = field(default_factory=dict)
    leases_seconds: float = math.inf
    readable: bool = True  # False: the API server has said that the operator may not

    @property
    def disrupted(self) -> bool:
        """Tell whether so many are silent that the control plane or its network has failed."""
        return disrupted(self.workers, self.unready)


FORBIDDEN: Final = Nodes(workers=0, unready=0, readable=False)


def disrupted(workers: int, unready: int) -> bool:
    """Apply the rule by which Kubernetes' node lifecycle controller stops or slows evictions."""
    most = unready > _FEW and unready >= _UNHEALTHY_SHARE * workers
    return unready == workers or most


def signals_of(raw: Mapping[str, Any]) -> Signals:
    """Parse the chart's value nodeSignals, which its schema has checked."""
    conditions, taints = (
        tuple(filter(None, map(text, sequence(raw.get(name))))) for name in ("conditions", "taints")
    )
    return Signals(conditions, taints, raw.get("cordon") is True)


def record(obj: Mapping[str, Any], signals: Signals = NO_SIGNALS) -> NodeRecord:
    """Parse a Node object; one without a Ready condition is not ready, as for Kubernetes."""
    spec = mapping(obj.get("spec"))
    taints = {text(mapping(t).get("key")) for t in sequence(spec.get("taints"))}
    listed = map(mapping, sequence(mapping(obj.get("status")).get("conditions")))
    conditions = {text(c.get("type")): c for c in listed}
    ready = conditions.get("Ready", {})
    shown = {f"{name}={text(c.get('status'))}" for name, c in conditions.items()}
    signs = [
        *(f"condition {c}" for c in signals.conditions if {c, f"{c}=True"} & shown),
        *(f"taint {key}" for key in signals.taints if key in taints),
        *(["cordon"] if signals.cordon and spec.get("unschedulable") is True else []),
    ]
    return NodeRecord(
        name=obj["metadata"]["name"],
        ready=ready.get("status") == "True",
        since=parse_time(ready.get("lastTransitionTime")),
        out_of_service=OUT_OF_SERVICE in taints,
        control_plane=_CONTROL_PLANE in taints,
        signal=next(iter(signs), ""),
    )
