"""Build a planning round's input: the job parsed, its pods sorted, the clock.

plan() builds a View with build_view() and hands it, or a part of it, to each policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from ddpjob_operator.core.actions import ApiFeedback, Refusal
from ddpjob_operator.core.change import Clock
from ddpjob_operator.core.nodes.fence import Fence
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job, Pod
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Failure, Status
from ddpjob_operator.core.progress import Reported
from ddpjob_operator.core.seats import Seats

#: Shorter than this, creating a container or ending a pod is no stall yet.
PATIENCE: Final = timedelta(seconds=20)


@dataclass(frozen=True, slots=True)
class View:
    """One job as a planning round sees it."""

    job: Job
    spec: Spec
    status: Status
    seats: Seats
    feedback: ApiFeedback
    clock: Clock
    fence: Fence
    reported: Reported
    nodes: Nodes | None = None  # None: they could not be read yet

    @property
    def now(self) -> datetime:
        """Return the time of this planning round."""
        return self.clock.now

    @property
    def begun_at(self) -> datetime | None:
        """Return when the attempt began; a time ahead was stored by another clock."""
        since, seen = self.status.timings.attempt_started_at, self.feedback.seen_since
        return seen if since and seen and since > self.now else since

    def fresh(self, patience: timedelta = PATIENCE) -> bool:
        """Tell whether the attempt is too young for a wait to be news."""
        since = self.begun_at
        return since is None or not self.clock.reached(since + patience)

    @property
    def refusals(self) -> dict[int, Refusal]:
        """Return the API's refusals of this attempt's creations that still leave a gap."""
        known, now = self.feedback.refusals, self.status.attempt
        return {r: known[r] for r in self.seats.missing if r in known and known[r].attempt == now}

    @property
    def network_refusal(self) -> Refusal | None:
        """Return the API's refusal of what this attempt's pods need until they have nodes."""
        found = self.feedback.network_refusal
        known = found is not None and found.attempt == self.status.attempt
        return found if known and not self.seats.all_placed else None

    def chance(self, *what: int) -> float:
        """Return a number from 0 to 1, constant for each job, attempt and ``what``.

        It is drawn from a hash, since a random number would have to be remembered.
        """
        seed = "/".join(map(str, (self.job.uid, self.status.attempt, *what)))
        return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4]) / 2**32


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
    read = feedback.confirmed
    read = read if read is not None and read.attempt == status.attempt else None
    seats = Seats(spec, status, members, tuple(others), read, feedback.seen)
    clock = Clock(now)
    fence = Fence(nodes, spec.fence_after, feedback, clock)
    reported = Reported(status, feedback.progress, members)
    return View(job, spec, status, seats, feedback, clock, fence, reported, nodes)


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
