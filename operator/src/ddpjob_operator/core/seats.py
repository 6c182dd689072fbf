"""Tell which seats of a gang have their pod, and what a quorum read has shown of the others.

A watch may be behind, so a missing pod may be there. It counts as gone only where a quorum read
(actions.QuorumRead) has shown that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import QuorumRead
from ddpjob_operator.core.objects.observe import Pod
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Status

#: More restarts than this between a backup of etcd and its restore are not assumed.
_ATTEMPTS_AHEAD: Final = 10_000
#: Ranks end together; a replica that still works so long after another one is reported.
_LINGERING: Final = timedelta(minutes=10)


@dataclass(frozen=True)  # without slots: there may be 10,000 pods, so answers are kept
class Seats:
    """``members`` by seat: the gang's pods (rule O1); ``others``: ours, but no members.

    A seat is the number of a pod, a replica a place in the gang. Without pods that stand by they
    are the same; with them the hub says who serves which, and counts have to do. ``read``: the
    newest quorum read of this attempt by this process; ``seen``: the seats whose pods it has seen.
    """

    spec: Spec
    status: Status
    members: Mapping[int, Pod]
    others: tuple[Pod, ...] = ()
    read: QuorumRead | None = None
    seen: frozenset[int] = frozenset()

    @property
    def pods(self) -> tuple[Pod, ...]:
        """Return all pods of the job."""
        return (*self.members.values(), *self.others)

    @cached_property
    def pods_left(self) -> bool:
        """Tell whether the cache shows a pod that has not ended."""
        return any(not pod.ended for pod in self.pods)

    @cached_property
    def needed(self) -> dict[int, Pod]:
        """Return the members without those that are done: their removal costs nothing."""
        done = self.status.succeeded
        return {r: pod for r, pod in self.members.items() if self.served(pod) not in done}

    @cached_property
    def running(self) -> frozenset[int]:
        """Return the seats whose trainer runs."""
        return frozenset(r for r, pod in self.members.items() if evidence.running(pod))

    @cached_property
    def succeeded(self) -> frozenset[int]:
        """Return the replicas done in this attempt; stored ones count without their pod."""
        done = {self.served(pod) for pod in self.members.values() if evidence.succeeded(pod)}
        return self.status.succeeded.union(r for r in range(self.spec.replicas) if r in done)

    @cached_property
    def all_running(self) -> bool:
        """Tell whether every replica runs or is done already: the hub's, and enough others."""
        on = self.running | self.succeeded
        return 0 in on and len(on) >= self.spec.replicas

    @property
    def all_placed(self) -> bool:
        """Tell whether no wanted seat is without a pod, and no pod without a node."""
        return not self.missing and all(pod.node for pod in self.members.values())

    @property
    def any_placed(self) -> bool:
        """Tell whether any member has a node."""
        return any(pod.node for pod in self.members.values())

    @property
    def lingering_at(self) -> datetime | None:
        """Return when to report that some replicas are done and others do not end.

        The pod of a finished replica may be gone, as after a drain: it counts from the start then.
        """
        began = self.status.timings.running_at
        pods = (self.members.get(replica) for replica in self.succeeded)
        done = (pod.trainer.finished_at if pod is not None else began for pod in pods)
        first = min((at for at in done if at is not None), default=None)
        return None if first is None else first + _LINGERING

    @property
    def next_attempt(self) -> int:
        """Return the next attempt: above that of each pod, even after etcd was restored.

        A number far ahead was written by a stranger: its pod just goes.
        """
        seen = [pod.attempt or 0 for pod in self.others]
        believed = [n for n in seen if n <= self.status.attempt + _ATTEMPTS_AHEAD]
        return max([self.status.attempt, *believed]) + 1

    def served(self, pod: Pod) -> int | None:
        """Return the replica that a pod served, by its launcher's last words, else its seat.

        -1: none, it stood by.
        """
        report = pod.trainer.report if self.spec.standby else None
        return pod.replica if report is None or report.replica is None else report.replica

    # --- Seats without a member: each had one (``expected``) or never had (``not_created``) -----

    @cached_property
    def missing(self) -> list[int]:
        """Return the wanted seats without a member that have not succeeded in this attempt.

        Pods that stand by are wanted once the gang runs, till the first replica is done.
        """
        status, wanted = self.status, self.spec.seats
        if len(self.members) == wanted:
            return []
        begins = status.phase != "Running" and status.attempt == status.members_since
        if begins or self.succeeded:
            wanted = self.spec.replicas
        have = self.members.keys() | self.succeeded
        return [r for r in range(wanted) if r not in have]

    @cached_property
    def expected(self) -> list[int]:
        """Return missing seats that had a pod, without those yet to be created."""
        runs = self.status.phase == "Running"
        seen = self.seen if runs or self.status.phase == "Starting" else frozenset()
        return [r for r in self.missing if r in seen or self._was_created(r, runs)]

    @cached_property
    def not_created(self) -> list[int]:
        """Return missing seats whose pods are yet to be created."""
        had = set(self.expected)
        return [r for r in self.missing if r not in had]

    @cached_property
    def gone(self) -> list[int]:
        """Return missing seats that had a pod and that a quorum read has shown to be gone."""
        read = self.read
        if read is None:
            return []
        known = [r for r in self.expected if r in read.seen or self._was_created(r, read.running)]
        return [r for r in known if r not in read.replicas and read.asked(r)]

    @property
    def loss_unproven(self) -> bool:
        """Tell whether a member is missing that no quorum read has shown to be gone."""
        return len(self.gone) < len(self.expected)

    @cached_property
    def need_read(self) -> bool:
        """Tell whether missing seats may have a member that only a quorum read would show.

        A new pod of a replacement, or one of the standbys, may have been made unseen by the cache.
        """
        read, status = self.read, self.status
        made = status.phase == "Running" or (status.replacing and status.phase == "Starting")
        return self.loss_unproven or (
            made and any(not (read and read.asked(r)) for r in self.not_created)
        )

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

    # --- The quorum read itself -----------------------------------------------------------------

    def read_since(self, at: datetime | None) -> bool:
        """Tell whether all pods were read from the API server itself after that time."""
        read = self.read
        return at is not None and read is not None and not read.seats and read.at >= at
