"""Replace lost pods alone while the launchers of the other replicas wait for them.

restart.py asks to_replace() after each loss; if it names nobody, the whole gang restarts. begin()
stores the intent: a new attempt that keeps membersSince and raises the least attempt of the lost
seats (status.births), so that their old pods are no members any more. Barrier, phase Starting and
creations are those of a whole start (barrier.py), for these seats alone: while replacing, a least
attempt equal to the present one is that of a pod to be made. failed() ends the wait. The rules
O1 to O5 keep one attempt and seat from naming two pods, and so two hubs from having one number.
Where pods stand by the gang runs as soon as enough pods do, for the hub has filled the place by
itself; the new pod, made while it runs, is the next to stand by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_contract import ExitCode
from ddpjob_operator.core import evidence
from ddpjob_operator.core.capacity import pod_group
from ddpjob_operator.core.change import Change, Clock, Stall
from ddpjob_operator.core.failure_text import replicas
from ddpjob_operator.core.loss import cause
from ddpjob_operator.core.objects.observe import Job, Rounds
from ddpjob_operator.core.objects.status import MAX_MIN_ATTEMPTS, Failure, Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

_NAMED: Final = 10  # takeovers in one Event
#: A hub of an older version ends all where a GPU failed: those are then of the same incident.
_NOT_BY_HUB: Final = ("Hardware", "Infrastructure", "Disruption", "Collateral")


def record_hub_report(job: Job, status: Status, polled: Rounds | None, change: Change) -> Change:
    """Store that all launchers wait for a lost one, until a whole start, and who serves what."""
    if status.phase != "Running" or polled is None or polled.attempt != status.hub:
        return change
    waits = status.can_wait_for_replacement or polled.can_wait_for_replacement
    change = change.with_status(can_wait_for_replacement=waits, serving=polled.serving)
    took = sorted(polled.serving.items() - status.serving.items())
    names = ", ".join(f"{job.name}-{seat} serves replica {r}" for r, seat in took[:_NAMED])
    return change.event("Normal", "TookOver", f"standby pods: {names}") if took else change


def to_replace(
    view: View, loss: Failure, delay: float, planned: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Return the replicas to replace after this loss; none: all restart (rule O4).

    A quorum read has shown that nobody is in a missing seat (Seats.need_read, rule E14).
    ``delay``: seconds before new pods may be made. ``planned``: replaced with it, though they run.
    """
    in_time = view.now + timedelta(seconds=delay) < deadline(view.seats, view.now)
    able = view.status.can_wait_for_replacement and view.spec.restart.in_place > 0
    # A group of pods that is preempted is taken whole.
    taken = view.status.pod_group and pod_group.preempted(view.seats, loss)
    if not (able and in_time) or taken or view.seats.succeeded or _hub_ended(view.seats, loss):
        return frozenset()
    members = view.seats.members
    gone = {loss.replica, *planned, *view.seats.missing}
    gone |= {one.replica for one in view.fence.losses(view.seats.needed)}  # rule O3
    gone |= {r for r, pod in members.items() if pod.deleting or evidence.failed(pod)}
    newest = cause.ended_attempt(view.status)
    kept = (pod for r, pod in members.items() if r not in gone and (pod.attempt or 0) <= newest)
    waiting = any(map(evidence.running, kept))
    few = len(view.status.min_attempt_by_seat.keys() | gone) <= MAX_MIN_ATTEMPTS
    return frozenset(gone) if waiting and few else frozenset()


def begin(
    view: View,
    change: Change,
    gone: frozenset[int],
    message: str,
    delay: float = 0.0,
    *,
    reason: str = "Replacing",
) -> Change:
    """Record the intent to replace these replicas' pods (rule O2); ``reason``: of the Event."""
    attempt, status = view.seats.next_attempt, change.status
    change = change.with_status(
        phase="Restarting",
        attempt=attempt,
        min_attempt_by_seat={**status.min_attempt_by_seat, **dict.fromkeys(gone, attempt)},
        serving={},
        # A new hub counts its rounds from 0.
        restarts=replace(status.restarts, round=0 if 0 in gone else status.restarts.round),
        timings=replace(
            status.timings,
            attempt_started_at=view.now,
            running_at=None,
            next_restart_at=view.now + timedelta(seconds=delay) if delay else None,
            replacing_since=view.status.replacing_since(view.now),
        ),
    )
    change = change.condition("Running", False, "Replacing", message, view.now)
    return change.event("Warning", reason, message)


def retry_as_new_attempt(view: View, change: Change, seats: frozenset[int]) -> Change:
    """Take another attempt for what maybe_created() names; a gang that runs goes on (rule O5)."""
    what = f"cannot tell whether pods of {replicas(seats, 40)} were created"
    change = begin(view, change, seats, f"{what}; retrying them as a new attempt")
    since = view.status.timings.running_at
    return change.with_status(timings=replace(change.status.timings, running_at=since))


def maybe_created(seats: Seats, begun: int) -> frozenset[int]:
    """Return the missing seats that this process may not make in this attempt (rule O5).

    Only the process that has stored phase Starting makes them, each once. After a crash, or a
    creation without an answer, a pod of this attempt may have been there. Of a whole start that
    holds for the hub's seat, where a second pod would be a second hub of its number, and after a
    crash: it is made first, so that little is lost.
    """
    read, status = seats.read, seats.status
    runs = status.phase == "Running" and status.can_wait_for_replacement
    if not (runs or status.phase == "Starting") or read is None:
        return frozenset()
    part = runs or status.replacing
    if read.begun if part else begun == status.attempt:
        return frozenset()
    asked = seats.not_created if runs else seats.missing if part else seats.missing[:1]
    absent = (r for r in asked if r not in read.replicas and (part or r == 0))
    return frozenset(filter(read.asked, absent))


def deadline(seats: Seats, now: datetime) -> datetime:
    """Return when all pods restart instead: launchers wait no longer, whatever is in the way."""
    patience = timedelta(seconds=seats.spec.restart.replace_seconds)
    return seats.status.replacing_since(now) + patience


def runs_past_deadline(seats: Seats, clock: Clock) -> bool:
    """Tell whether the gang runs by the deadline, though a lost pod's object is in the way."""
    runs = seats.status.replacing and seats.all_running
    return runs and clock.reached(deadline(seats, clock.now))


def failed(seats: Seats, clock: Clock, stalls: Iterator[Stall]) -> tuple[str, str] | None:
    """Return reason and message if the replacement under way has failed; None: it goes on."""
    spec, status = seats.spec, seats.status
    if status.attempt not in status.min_attempt_by_seat.values():
        what = "status.min_attempt_by_seat is not stored: the CRD is older than the operator"
        return "Restarting", what
    # Where pods stand by the gang is whole again without the lost one's successor.
    if seats.succeeded and not (spec.standby and seats.all_running):
        done = replicas(seats.succeeded, 40)
        return "Restarting", f"{done} ended with 0 while lost pods were replaced"
    until = deadline(seats, clock.now)
    if seats.all_running or not clock.reached(until) or not seats.read_since(until):
        return None
    left = replicas(frozenset(range(spec.replicas)) - seats.running, 40)
    why = next((one.message for one in stalls), "no reason is known")
    most = f"spec.restart.replaceSeconds {spec.restart.replace_seconds}"
    return "ReplaceDeadlineExceeded", f"{left} did not run within {most}: {why}"


def too_late(seats: Seats, loss: Failure) -> str:
    """Say that a new pod found the others done, and gave up; "" of any other loss.

    A pod that had succeeded was removed before that was stored. The hub has ended with 0, so no
    round is to come, and a pod that came after it can join none: that is no fault of the program.
    """
    status, done = seats.status, seats.succeeded
    left = (r for r in range(seats.spec.replicas) if r not in done)
    before_hub = any(status.min_attempt(r) <= status.hub for r in left)
    if loss.exit_code != ExitCode.PEER_LOST or before_hub:
        return ""
    return (
        f"{replicas(done, 40)} succeeded before the new pod of replica {loss.replica} joined them;"
        " cannot tell whether its old pod had succeeded, too"
    )


def with_deadline(seats: Seats, now: datetime, why: Iterator[Stall]) -> Iterator[Stall]:
    """Add to the reasons for a stall how long the other pods wait."""
    waits = seats.status.replacing and not seats.all_running
    until = deadline(seats, now) if waits else None
    return (replace(one, until=until) for one in why)


def _hub_ended(seats: Seats, loss: Failure) -> bool:
    """Return True if the hub ended the attempt: a holding launcher exits only on a signal.

    A new pod may fail and report before it has come to the hub.
    """
    pod = seats.members.get(loss.replica)
    if pod is None or (pod.attempt or 0) > cause.ended_attempt(seats.status):
        return False
    own, report = loss.cls not in _NOT_BY_HUB, pod.trainer.report
    return own and report is not None and report.kind != "sigterm"
