"""Machines as far as a job's pods are on them: ready, not ready and since when, or gone.

A Node object is 10 KiB and more; of one that a job's pods are on, this is what plan() sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ddpjob_operator.core.lenient import mapping, parse_time, sequence, text

#: An administrator's word that the machine is off: Kubernetes then lets go of its pods.
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
_CONTROL_PLANE: Final = "node-role.kubernetes.io/control-plane"
#: --unhealthy-zone-threshold of kube-controller-manager, which holds for more than two nodes.
_UNHEALTHY_SHARE: Final = 0.55
_FEW: Final = 2


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a Node object. ``since``: of its Ready condition's last transition.

    By the cluster's clock, so only good to tell one transition from another.
    """

    name: str
    ready: bool
    since: datetime | None
    out_of_service: bool = False
    control_plane: bool = False  # tainted so: work does not go there


@dataclass(frozen=True, slots=True)
class Node:
    """One machine for one run of the planner.

    ``down_seconds``: for how long this process has seen that it is not ready.
    ``read_seconds``: how long ago a quorum last told of it; None if only a watch has.
    ``guessed``: no list and no watch has told of it yet, only a pod that is there.
    """

    name: str
    exists: bool = True
    ready: bool = True
    out_of_service: bool = False
    down_seconds: float = 0.0
    read_seconds: float | None = None
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Nodes:
    """Those that carry a job's pods, by name, and how the workers of the cluster are.

    ``calm_seconds``: for how long they have not been silent together.
    """

    workers: int
    unready: int
    calm_seconds: float = math.inf
    known: Mapping[str, Node] = field(default_factory=dict)
    readable: bool = True  # False: the API server has said that the operator may not

    @property
    def disrupted(self) -> bool:
        """So many are silent at once that it is the control plane, or its network, that failed."""
        return disrupted(self.workers, self.unready)


FORBIDDEN: Final = Nodes(workers=0, unready=0, readable=False)


def disrupted(workers: int, unready: int) -> bool:
    """The rule of Kubernetes' node lifecycle controller, by which it stops or slows evictions."""
    most = unready > _FEW and unready >= _UNHEALTHY_SHARE * workers
    return unready == workers or most


def record(obj: Mapping[str, Any]) -> Record:
    """A Node object -> Record. Without a Ready condition it is not ready, as for Kubernetes."""
    taints = {text(mapping(t).get("key")) for t in sequence(mapping(obj.get("spec")).get("taints"))}
    conditions = sequence(mapping(obj.get("status")).get("conditions"))
    found = (mapping(c) for c in conditions if mapping(c).get("type") == "Ready")
    ready: Mapping[str, Any] = next(found, {})
    return Record(
        name=obj["metadata"]["name"],
        ready=ready.get("status") == "True",
        since=parse_time(ready.get("lastTransitionTime")),
        out_of_service=OUT_OF_SERVICE in taints,
        control_plane=_CONTROL_PLANE in taints,
    )
