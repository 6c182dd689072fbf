"""Define the actions that the planner asks for, and the API's answers to them.

plan() returns a Plan, shell/executor.py carries it out in order. ApiFeedback is the planner's only
memory outside the API server and holds what no watch returns: losing it (an operator restart) costs
reads, never a decision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from ddpjob_operator.core.objects.ledger import LauncherAccount
from ddpjob_operator.core.objects.observe import Existing, Rounds
from ddpjob_operator.core.objects.status import Progress
from ddpjob_operator.core.objects.workload import Condition, Placement, Workload

Body = Mapping[str, Any]

#: Names of pods, times and numbers of requests, which differ in the same refusal.
_FIGURES: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event about the job, sent only after the status write it belongs to."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """One observation for /metrics, counted only after the status write it belongs to.

    ``name``: a metric of shell/telemetry.py without its prefix; ``label``: its only label.
    """

    name: Literal[
        "restarts_total",
        "finished_total",
        "rounds_total",
        "detection_seconds",
        "recovery_seconds",
        "time_to_running_seconds",
        "lost_steps",
        "pod_seconds_total",
        "gpu_seconds_total",
    ]
    value: float
    label: str | None = None


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace .status, guarded by the resourceVersion of the job that was planned on.

    ``begins``: phase Starting begins with it, so that QuorumRead.begun becomes true.
    ``takes_over``: from another operator, which may have acted since the last QuorumRead.
    """

    status: Body
    events: tuple[Event, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    begins: bool = False
    takes_over: bool = False


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one pod with its uid as precondition. None: the pod's own grace period."""

    name: str
    uid: str
    grace_seconds: int | None


@dataclass(frozen=True, slots=True)
class ConfirmGone:
    """One quorum LIST of the job's pods, then a GET of the job, both cached.

    If the job is still at ``attempt``, ApiFeedback.confirmed holds the result. It comes before
    creations, and before any decision that is final.

    ``evicted``: it is asked for since Kueue has taken the quota of a gang with pods.
    ``seats``: of the pods of these alone, since 1,000 take long to read; empty: of all.
    """

    attempt: int
    evicted: bool = False
    seats: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadNodes:
    """GET each node from a quorum; the answer, or its absence, replaces the cache."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadLeases:
    """LIST the Leases of all nodes; a refusal counts as none."""


@dataclass(frozen=True, slots=True)
class EnsureNetwork:
    """GET the Service and the NetworkPolicy, POST what is missing, PUT what differs.

    The Secret is only POSTed, with bytes drawn then: one that is there is the job's. A PodGroup is
    immutable: if it cannot be had, or not whole, ApiFeedback.no_gang says why. When all exist,
    those that were read with our owner uid, ApiFeedback.network_attempt becomes ``attempt``; a
    refusal goes to ApiFeedback.network_refusal.
    """

    attempt: int
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True)
class RemoveGroups:
    """LIST the job's PodGroups and DELETE each, for no attempt has one now.

    ApiFeedback.groups_removed becomes ``name``. ``version``: of the API; "": it is not served.
    """

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """POST one pod with fieldValidation=Strict; a refusal goes to ApiFeedback.refusals."""

    replica: int
    attempt: int
    body: Body


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the DDPJob itself (ttlSecondsAfterFinished), uid and version as preconditions.

    A job that is no longer finished, since etcd was restored, stays.
    """

    uid: str


@dataclass(frozen=True, slots=True)
class EnsureWorkload:
    """POST the Workload, with the priority of its class, or of that of the pods.

    A refusal goes to ApiFeedback.workload_refusal.
    """

    body: Body
    priority_class: str


@dataclass(frozen=True, slots=True)
class WriteWorkload:
    """PUT conditions of the Workload, if it is still at that version; ``give_back``: its quota."""

    name: str
    version: str
    conditions: Mapping[str, Condition]
    reclaimed: int | None = None  # pods that need no quota any more
    give_back: bool = False


@dataclass(frozen=True, slots=True)
class ReadWorkload:
    """GET the Workload; what follows in the plan is left undone unless it is at that version."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class DeleteWorkload:
    """Delete the Workload with its uid as precondition."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ReadFlavors:
    """GET the ResourceFlavors of an admission; ApiFeedback.flavors holds the answer."""

    admission: str
    names: tuple[str, ...]


Read = ConfirmGone | ReadNodes | ReadLeases | ReadFlavors | ReadWorkload
Queue = EnsureWorkload | WriteWorkload | DeleteWorkload
Action = (
    WriteStatus | DeletePod | Read | EnsureNetwork | RemoveGroups | CreatePod | DeleteJob | Queue
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions to take now. ``requeue_after``: seconds until time alone may change them."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API's refusal of a creation; ``existing``: the object that has the name, if one has."""

    attempt: int
    code: int  # HTTP status; 0: no answer
    reason: str  # Status.reason: AlreadyExists, Forbidden, Invalid, BadRequest, ...
    message: str
    at: datetime
    existing: Existing | None = None
    generation: int = 0  # of the job, and its phase, when it was tried
    phase: str = ""

    @property
    def pattern(self) -> str:
        """Return code and message without figures."""
        return f"{self.code} {_FIGURES.sub('#', self.message)}"


@dataclass(frozen=True, slots=True)
class QuorumRead:
    """The result of one quorum read of the job's pods, and then of the job.

    It guarantees: begun at ``at`` by a process that led, the read found the job at ``attempt``, of
    its members exactly those of ``replicas`` and, if ``alone``, no object of an older pod.

    It allows to create pods until the attempt changes, a creation or a status write has an unknown
    outcome, or the process stops leading; a watch does not renew it. It proves that a replica is
    gone if the replica existed before the read: it is among ``seen``, or the gang was stored as
    ``running`` with it. A deadline needs a read after the deadline, a suspension one of the job at
    that ``generation``. A POST of a deposed leader can still arrive after it: such a pod is of an
    older attempt, and is removed like any other.

    A read of a few ``seats`` guarantees this of their pods alone; a deadline or a suspension needs
    one of all.
    """

    attempt: int
    at: datetime
    generation: int = 0
    alone: bool = True
    running: bool = False
    seen: frozenset[int] = frozenset()
    replicas: frozenset[int] = frozenset()
    evicted: bool = False  # as it was asked for
    begun: bool = False  # this process has stored that phase Starting begins (rule O5)
    seats: frozenset[int] = frozenset()  # empty: all
    over: bool = False  # the job was parked, or at its end: what is gone stays gone

    def asked(self, seat: int) -> bool:
        """Tell whether it read that seat's pods."""
        return not self.seats or seat in self.seats


@dataclass(frozen=True, slots=True)
class ApiFeedback:
    """The API's answers about one job since this operator process started."""

    confirmed: QuorumRead | None = None
    begun: int = 0  # the attempt whose phase Starting this process has stored, as it led (rule O5)
    network_attempt: int = 0
    network_at: datetime | None = None  # when that was
    network_refusal: Refusal | None = None
    refusals: Mapping[int, Refusal] = field(default_factory=dict)  # the newest, by replica
    refused: tuple[Refusal, ...] = ()  # creations in a row, the newest last
    undeleted: Mapping[str, Refusal] = field(default_factory=dict)  # by the uid of a pod
    progress: Progress | None = None  # newest answer of GET /state
    rounds: Rounds | None = None  # of the same
    spent: LauncherAccount | None = None  # the newest account of a hub's launcher
    away: frozenset[str] = frozenset()  # uids of members whose link to the hub is lost, by
    away_at: datetime | None = None  # the newest answer
    status_written_at: datetime | None = None
    report_after: timedelta = timedelta()  # between two reports of progress, at most 60 s
    pruned: tuple[Body, Body] | None = None  # the last status that was not stored as it was sent
    seen: frozenset[int] = frozenset()  # replicas of this attempt that once had a pod
    lease: str = ""  # this operator's, NAMESPACE/NAME; "": it signs nothing
    version: str = ""  # this operator's
    gang_api: str = ""  # the version of the API that serves PodGroups; "": none
    no_gang: tuple[int, str] | None = None  # an attempt that can have no PodGroup, and why
    groups_removed: str = ""  # the last PodGroup, with all before it, that is gone or about to go
    metrics_from: tuple[Body, ...] = ()  # NetworkPolicyPeers of the settings; none: everybody
    seen_since: datetime | None = None  # since when this process has seen and acted without a gap
    workloads: tuple[Workload, ...] | None = None  # of Kueue; None: they cannot be read
    workload_refusal: Refusal | None = None
    flavors: tuple[str, Mapping[str, Placement]] | None = None  # of which admission, by name

    def begin(self, attempt: object) -> ApiFeedback:
        """Note that this process has stored the phase Starting of that attempt."""
        read = self.confirmed
        if read is not None and read.attempt == attempt:
            read = replace(read, begun=True)
        return replace(self, confirmed=read, begun=attempt if isinstance(attempt, int) else 0)
