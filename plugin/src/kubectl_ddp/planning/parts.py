"""Define what a gang's time is made of: commands/plan.py fills Parts, story.py and formulas.py ask.

Times are seconds. States have the names of the job's ledger (status.ledger).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: What fails. ``process`` and ``hang`` leave the pods alive; ``gpu`` ends the attempt.
KINDS: Final = ("process", "hang", "gpu", "pod", "node")
#: Where pod-seconds go. Those that a failure brought about are booked with its kind, too.
STATES: Final = (
    "productive", "repeated", "recovering", "held", "waiting", "starting", "warmup", "snapshot",
    "data", "idle",
)  # fmt: skip

DAY: Final = 86400.0
#: Llama 3 (arXiv 2407.21783, table 5): unexpected interruptions of 16,384 GPUs in 54 days.
LLAMA3: Final[Mapping[str, float]] = {"process": 54, "hang": 42, "gpu": 268, "pod": 0, "node": 55}
LLAMA3_GPU_MTBF: Final = 16384 * 54 * DAY / sum(LLAMA3.values())
#: ``hub``: a node with replica 0's pod, which only Kubernetes notices.
DETECTION: Final[Mapping[str, float]] = {
    "process": 0.0, "hang": 300.0, "gpu": 1.0, "pod": 1.0, "node": 25.0, "hub": 80.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a failure to the first step after it, in this order."""

    detection: float
    teardown: float  # until what is left of the pods that are to go is gone
    wait: float  # until there is room for a new pod
    start: float  # of the new pods, until their processes begin
    warmup: float
    new: int  # pods

    @property
    def held(self) -> float:
        """Return the seconds in which pods that live on wait for new ones."""
        return self.wait + self.start

    @property
    def seconds(self) -> float:
        """Return all of it."""
        return self.detection + self.teardown + self.held + self.warmup


@dataclass(frozen=True, slots=True)
class Case:
    """A failure without its moment."""

    kind: str
    hub: bool = False  # it meets replica 0's pod
    announced: bool = False  # known beforehand: all ranks save, then the pod is replaced


@dataclass(frozen=True, slots=True)
class Parts:
    """A gang, how it fails and what each part of its time takes."""

    pods: int = 8
    gpus_per_pod: int = 8
    standby: int = 0
    #: Mean time between failures of a node, or of the one pod on it, of all kinds together.
    node_mtbf: float = LLAMA3_GPU_MTBF / 8
    shares: Mapping[str, float] = field(default_factory=lambda: LLAMA3)  # weights of KINDS
    announced: float = 0.0  # share of lost nodes that are known beforehand
    detection: Mapping[str, float] = field(default_factory=lambda: DETECTION)
    in_place: bool = True  # a failed process restarts in its pod
    alone: bool = True  # a lost pod is replaced while the others hold
    teardown: float = 1.0
    wait: float = 0.0  # for capacity, after a lost GPU, pod or node
    start: float = 30.0  # of a pod: image, container, until its processes begin
    start_per_pod: float = 0.02  # more for each pod, where all start
    warmup: float = 23.0  # of a new pod, until the first step: imports, compilation, load
    warmup_spare: float = 15.0  # of a process that was warm: in place, or in a standby
    step: float = 1.0
    data: float = 0.0  # part of a step that waits for input
    every_steps: int = 100
    stall: float = 0.1  # of training, at each snapshot
    write: float = 2.0  # in the background, until it is durable

    @property
    def rate(self) -> float:
        """Return the failures of the gang per second."""
        return self.pods / self.node_mtbf

    @property
    def gpus(self) -> int:
        """Return those of the gang and of its standbys."""
        return (self.pods + self.standby) * self.gpus_per_pod

    def cases(self) -> list[tuple[Case, float]]:
        """List what may fail, each with its probability."""
        total = sum(self.shares.values())
        found = []
        for kind in KINDS:
            share = self.shares.get(kind, 0) / total
            known = self.announced if kind == "node" else 0.0
            hub = 1 / self.pods if kind in ("pod", "node") else 0.0
            for case, part in (
                (Case(kind), (1 - hub) * (1 - known)),
                (Case(kind, hub=True), hub * (1 - known)),
                (Case(kind, announced=True), (1 - hub) * known),
                (Case(kind, hub=True, announced=True), hub * known),
            ):
                found.append((case, share * part))
        return [one for one in found if one[1] > 0]

    def all_start(self) -> float:
        """Return the seconds until the processes of all new pods begin."""
        return self.start + self.start_per_pod * self.pods

    def recovery(self, case: Case, *, standby: bool = False) -> Recovery:
        """Tell how the gang comes back; ``standby``: one is parked and may take the place."""
        seen = "hub" if case.hub and case.kind == "node" else case.kind
        noticed = 0.0 if case.announced else self.detection[seen]
        dies = case.kind in ("process", "hang")
        if self.in_place and dies:
            return Recovery(noticed, 0, 0, 0, self.warmup_spare, 0)
        wait = 0.0 if dies else self.wait
        if self.replaced_alone(case):
            if standby and not case.hub:
                return Recovery(noticed, 0, 0, 0, self.warmup_spare, 0)
            return Recovery(noticed, self.teardown, wait, self.start, self.warmup, 1)
        return Recovery(noticed, self.teardown, wait, self.all_start(), self.warmup, self.pods)

    def replaced_alone(self, case: Case) -> bool:
        """Tell whether the other pods hold; they do not for a failed GPU."""
        return self.alone and case.kind in ("pod", "node")
