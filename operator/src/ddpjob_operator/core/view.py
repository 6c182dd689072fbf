"""Build a planning round's input: the job parsed, its pods sorted, the clock, what is reported.

plan() builds a View with build_view() and hands it, or a part of it, to each policy. What launchers
report of progress is merged here: report/conditions.py asks with each poll, gang/finish.py at the
end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final

from ddpjob_operator.core.actions import ApiFeedback, Refusal
from ddpjob_operator.core.change import Change, Clock
from ddpjob_operator.core.nodes.fence import Fence
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job, Pod, Report
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Failure, Progress, Restarts, Status
from ddpjob_operator.core.seats import Seats

#: Shorter than this, creating a container or ending a pod is no stall yet.
PATIENCE: Final = timedelta(seconds=20)
#: Fields of Progress that no later one fills in.
_NOT_MERGED: Final = ("proof", "straggler", "other_job", "silent", "connected", "updated_at")
#: What may come from printed lines alone.
_SHOWN: Final = ("printed_step", "printed_total_steps", "metrics", "loss", "steps_per_second")


@dataclass(frozen=True)  # without slots: answers are kept
class Reported:
    """The most that any source reports: the status, the last poll, the members' last words."""

    status: Status
    polled: Progress | None
    members: Mapping[int, Pod]

    @cached_property
    def snapshot_step(self) -> int:
        """Return the newest committed snapshot; 0: none."""
        return max(one.snapshot_step or 0 for one in self._all)

    @cached_property
    def file_at(self) -> datetime | None:
        """Return the newest mtime at the progress path."""
        return max((one.file_at for one in self._all if one.file_at), default=None)

    @cached_property
    def _all(self) -> list[Progress | Restarts | Report]:
        words = (pod.trainer.report for pod in self.members.values())
        found = (self.status.progress, self.status.restarts, self.polled, *words)
        return [one for one in found if one]


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


def received(old: Progress, new: Progress | None) -> Progress:
    """Return the newest progress; a poll without news moves no timestamp.

    The first one has its own: verdict.py asks whether anything was reported before.
    """
    if new is None:
        return old
    reported = (
        (f.name, getattr(new, f.name)) for f in fields(Progress) if f.name not in _NOT_MERGED
    )
    merged = replace(old, **{name: value for name, value in reported if value not in (None, "")})
    if old.step is not None and new.step is None:
        # Printed numbers decide nothing: they are no sign of a program that reports its steps.
        shown = {name: getattr(old, name) for name in _SHOWN}
        if replace(merged, **shown) == old:
            return merged
    news = merged != old or old.updated_at is None
    return replace(merged, updated_at=new.updated_at) if news else old


def began_from(status: Status, change: Change, resumed: str, *, other_job: bool) -> Change:
    """Report once that a snapshot is another job's, or was made by another program."""
    if resumed in ("", status.progress.resumed):
        return change
    if not other_job:
        return change.event("Normal", "ProgramChanged", f"training goes on from a state {resumed}")
    cure = (
        "to train from the start apply it under another name, or with spec.snapshot.resume: Never"
    )
    return change.event("Warning", "OtherSnapshots", f"training goes on from {resumed}; {cure}")
