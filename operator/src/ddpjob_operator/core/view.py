"""Build a planning round's input: the job parsed, its pods sorted, the clock.

plan() builds a View with build_view() and hands it, or a part of it, to each policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from ddpjob_operator.core import actions, evidence
from ddpjob_operator.core.actions import ApiFeedback, QuorumRead, Refusal
from ddpjob_operator.core.change import Clock
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job, Pod, Report
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Failure, Progress, Restarts, Status

#: More restarts than this between a backup of etcd and its restore are not assumed.
_ATTEMPTS_AHEAD = 10_000
#: Shorter than this, creating a container or ending a pod is no stall yet.
PATIENCE: Final = timedelta(seconds=20)
#: Ranks end together; a replica that still works so long after another one is reported.
LINGERING: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class View:
    """``members`` by seat: the gang's pods (rule O1); ``others``: ours, but no members.

    A seat is the number of a pod, a replica a place in the gang. Without pods that stand by they
    are the same; with them the hub says who serves which, and counts have to do.
    """

    job: Job
    spec: Spec
    status: Status
    members: Mapping[int, Pod]
    others: tuple[Pod, ...]
    feedback: ApiFeedback
    clock: Clock
    nodes: Nodes | None = None  # None: they could not be read yet

    @property
    def now(self) -> datetime:
        """Return the time of this planning round."""
        return self.clock.now

    @property
    def pods(self) -> tuple[Pod, ...]:
        """Return all pods of the job."""
        return (*self.members.values(), *self.others)

    @property
    def needed(self) -> dict[int, Pod]:
        """Return the members without those that are done: their removal costs nothing."""
        done = self.status.succeeded
        return {r: pod for r, pod in self.members.items() if self.served(pod) not in done}

    @property
    def seats(self) -> int:
        """Return how many pods are wanted: those that stand by once the gang runs, till its end."""
        status, replicas = self.status, self.spec.replicas
        begins = status.phase != "Running" and status.attempt == status.members_since
        few = not self.spec.standby or begins or self.succeeded
        return replicas if few else replicas + self.spec.standby

    @property
    def missing(self) -> list[int]:
        """Return the seats without a member that have not succeeded in this attempt."""
        if len(self.members) == self.spec.seats:
            return []  # asked for many times a plan
        have = self.members.keys() | self.succeeded
        return [r for r in range(self.seats) if r not in have]

    def served(self, pod: Pod) -> int | None:
        """Return the replica that a pod served, by its launcher's last words, else its seat.

        -1: none, it stood by.
        """
        report = pod.trainer.report if self.spec.standby else None
        return pod.replica if report is None or report.replica is None else report.replica

    @property
    def succeeded(self) -> frozenset[int]:
        """Return the replicas done in this attempt; stored ones count without their pod."""
        done = {self.served(pod) for pod in self.members.values() if evidence.succeeded(pod)}
        return self.status.succeeded.union(r for r in range(self.spec.replicas) if r in done)

    @property
    def refusals(self) -> dict[int, Refusal]:
        """Return the API's refusals of this attempt's creations that still leave a gap."""
        known, now = self.feedback.refusals, self.status.attempt
        return {r: known[r] for r in self.missing if r in known and known[r].attempt == now}

    @property
    def network_refusal(self) -> Refusal | None:
        """Return the API's refusal of what this attempt's pods need until they have nodes."""
        found = self.feedback.network_refusal
        if found is None or found.attempt != self.status.attempt:
            return None
        placed = not self.missing and all(pod.node for pod in self.members.values())
        return None if placed else found

    @property
    def confirmed(self) -> QuorumRead | None:
        """Return the newest quorum read of this attempt, made by this process."""
        found = self.feedback.confirmed
        return found if found and found.attempt == self.status.attempt else None

    @property
    def begun_at(self) -> datetime | None:
        """Return when the attempt began; a time ahead was stored by another clock."""
        since, seen = self.status.timings.attempt_started_at, self.feedback.seen_since
        return seen if since and seen and since > self.now else since

    @property
    def hidden(self) -> tuple[actions.Existing, ...] | None:
        """Return pods that no watch shows and that have not ended; None: not asked."""
        return self.confirmed.hidden if self.confirmed else None

    @property
    def replacing(self) -> bool:
        """Tell whether lost pods are being replaced while the other members wait."""
        status = self.status
        later = status.attempt > status.members_since
        return later and status.phase in ("Restarting", "Starting")

    @property
    def all_running(self) -> bool:
        """Tell whether every replica runs or is done already: the hub's, and enough others."""
        on = {r for r, pod in self.members.items() if evidence.running(pod)} | self.succeeded
        return 0 in on and len(on) >= self.spec.replicas

    def fresh(self, patience: timedelta = PATIENCE) -> bool:
        """Tell whether the attempt is too young for a wait to be news."""
        since = self.begun_at
        return since is None or not self.clock.reached(since + patience)

    @property
    def replacing_since(self) -> datetime:
        """Return when the replacement under way began; a time ahead is another clock's."""
        since = self.status.timings.replacing_since if self.replacing else None
        return min(since or self.now, self.now)

    @property
    def lingering_at(self) -> datetime | None:
        """Return when to report that some replicas are done and others do not end.

        The pod of a finished replica may be gone, as after a drain: it counts from the start then.
        """
        began = self.status.timings.running_at
        pods = (self.members.get(replica) for replica in self.succeeded)
        done = (pod.trainer.finished_at if pod is not None else began for pod in pods)
        first = min((at for at in done if at is not None), default=None)
        return None if first is None else first + LINGERING

    def chance(self, *what: int) -> float:
        """Return a number from 0 to 1, constant for each job, attempt and ``what``.

        It is drawn from a hash, since a random number would have to be remembered.
        """
        seed = "/".join(map(str, (self.job.uid, self.status.attempt, *what)))
        return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4]) / 2**32

    def read_since(self, at: datetime | None) -> bool:
        """Tell whether this view was read from the API server itself after that time."""
        read = self.confirmed
        return at is not None and read is not None and not read.seats and read.at >= at

    @property
    def gone(self) -> list[int]:
        """Return missing seats that had a pod and that a quorum read has shown to be gone."""
        read = self.confirmed
        if read is None:
            return []
        known = [r for r in self.expected if r in read.seen or self._was_created(r, read.running)]
        return [r for r in known if r not in read.replicas and read.asked(r)]

    @property
    def expected(self) -> list[int]:
        """Return missing seats that had a pod, without those yet to be created."""
        runs = self.status.phase == "Running"
        seen = self.feedback.seen if runs or self.status.phase == "Starting" else frozenset()
        return [r for r in self.missing if r in seen or self._was_created(r, runs)]

    @property
    def not_created(self) -> list[int]:
        """Return missing seats whose pods are yet to be created."""
        had = set(self.expected)
        return [r for r in self.missing if r not in had]

    def _was_created(self, seat: int, runs: bool) -> bool:
        """Tell whether the status alone shows that a seat had a pod; ``runs``: it says Running.

        During a replacement, seats whose least attempt is unchanged keep their pods. A whole start
        runs once all replicas do, a replacement with standbys before the lost pod is back.
        """
        status = self.status
        all_there = status.attempt == status.members_since or not self.spec.standby
        was = runs and all_there and seat < self.spec.replicas
        return was or (
            status.attempt > status.members_since and status.min_attempt(seat) < status.attempt
        )

    @property
    def in_doubt(self) -> bool:
        """Tell whether a quorum read has yet to show that a member is gone."""
        return len(self.gone) < len(self.expected)

    @property
    def unread(self) -> bool:
        """Tell whether missing seats may have a member that only a quorum read would show.

        A new pod of a replacement, or one of the standbys, may have been made unseen by the cache.
        """
        read, status = self.confirmed, self.status
        made = status.phase == "Running" or (self.replacing and status.phase == "Starting")
        return self.in_doubt or (
            made and any(not (read and read.asked(r)) for r in self.not_created)
        )

    @property
    def next_attempt(self) -> int:
        """Return the next attempt: above that of each pod, even after etcd was restored.

        A number far ahead was written by a stranger: its pod just goes.
        """
        seen = [pod.attempt or 0 for pod in self.others]
        believed = [n for n in seen if n <= self.status.attempt + _ATTEMPTS_AHEAD]
        return max([self.status.attempt, *believed]) + 1

    @property
    def snapshot_step(self) -> int:
        """Return the newest committed snapshot that any source reports."""
        return max(reported.snapshot_step or 0 for reported in self._reports)

    @property
    def saved_step(self) -> int:
        """Return the newest snapshot that the status knows of; 0: none.

        They lie on the volume of now: template_guard.py makes no pods for another.
        """
        return max(self.status.progress.snapshot_step or 0, self.status.restarts.snapshot_step)

    @property
    def reached_step(self) -> int:
        """Return the last step that any source reports as finished."""
        reported = (self.status.progress, self.feedback.progress, *self.status.failures)
        return max((one.step or 0 for one in reported if one), default=0)

    @property
    def file_at(self) -> datetime | None:
        """Return the newest mtime at the progress path that any source reports."""
        return max((one.file_at for one in self._reports if one.file_at), default=None)

    @property
    def _reports(self) -> list[Progress | Restarts | Report]:
        """List what tells of progress: the status, the last poll, the members' last words."""
        reports = (pod.trainer.report for pod in self.members.values())
        found = (self.status.progress, self.status.restarts, self.feedback.progress, *reports)
        return [reported for reported in found if reported]


def build_view(
    job: Job, pods: Sequence[Pod], feedback: ApiFeedback, now: datetime, nodes: Nodes | None
) -> View:
    """Parse the job and sort its pods; ignore those that its uid does not own."""
    spec = spec_.read(job.spec, job.name)
    status = st.from_dict(job.status, spec.replicas)
    members: dict[int, Pod] = {}
    others: list[Pod] = []
    for pod in pods:
        if pod.owner_uid != job.uid:
            continue
        if pod.replica is not None and pod.replica < spec.seats and belongs(status, pod):
            members[pod.replica] = pod
        else:
            others.append(pod)
    return View(job, spec, status, members, tuple(others), feedback, Clock(now), nodes)


def belongs(status: Status, pod: Pod) -> bool:
    """Tell whether a pod is its seat's member (rule O1).

    A seat's least attempt only rises, so an old view never takes a member for a stranger.
    """
    least = status.min_attempt(pod.replica)
    return pod.attempt is not None and least <= pod.attempt <= status.attempt


def recovers_from(status: Status) -> Failure | None:
    """Return the loss after which the gang restarts, over tries that were given back.

    None for the job's start or a resume, whose time counts by itself.
    """
    loss, since = status.last_loss, status.timings.started_at
    if loss is None:
        return None
    # Two operators' clocks may disagree; they matter only with a start in between.
    at_once = loss.attempt == status.attempt - 1 and status.restarts.consecutive > 0
    return loss if at_once or (since and loss.detected_at >= since) else None
