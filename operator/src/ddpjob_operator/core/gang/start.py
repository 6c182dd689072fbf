"""Start a gang, from the barrier until all members run, handle its failures, and park it.

plan() calls advance() while the phase is Starting. What the cluster refuses or has no room for is
given back uncharged; so is what the API server calls invalid, since the user or an admission
webhook may correct it. Creation is all or nothing: two half gangs must never hold what each other
needs. Each waits a different time (View.chance), or they would meet again at every try. A job that
is suspended, or waits in a queue, is parked: its pods keep their grace period for a snapshot, and
the time without pods counts for no deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.capacity import kueue, pod_group, refusals, template_guard
from ddpjob_operator.core.change import Change, Stall
from ddpjob_operator.core.failure_text import describe, every, initializing, plural, shorten
from ddpjob_operator.core.gang import barrier, handover, replacement, restart
from ddpjob_operator.core.loss import cause, verdict
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects.status import Failure, Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View, recovers_from

#: Only the user, or a webhook that changes pods, can correct it.
_CURE: Final = (
    "suspend the job, fix the template, resume; unchanged, it is retried with growing delays"
)
#: The longest wait of a gang between two tries, ...
_LONGEST: Final = 300.0
#: ... which shrinks down to this with its total wait: who has waited long is tried more often.
_LONGEST_OF_OLD: Final = 30.0
_OLD: Final = timedelta(hours=1)
#: Places held in vain for long are not asked for again at once: others may need less.
_SHARE_OF_HELD: Final = 0.1
#: A gang that finds no room at once, as behind a quota, holds places for seconds.
_IN_VAIN: Final = timedelta(minutes=1)


def begin(view: View, change: Change) -> Change:
    """Move to Starting: the barrier is passed, so the gang may be created now."""
    timings = replace(view.status.timings, attempt_started_at=view.now, next_restart_at=None)
    group = change.status.pod_group if view.status.replacing else pod_group.chosen(view)
    return change.with_status(phase="Starting", timings=timings, pod_group=group)


def deadline(view: View) -> datetime | None:
    """Return when all members must run, counted from the first create; None: not yet known.

    It counts again after a time in which the operator could not see or act (an API server that was
    away, a take-over, a clock that was set), and from when the last pod got its node, for until
    then the gang waited for the cluster; by the cluster's clock, but between once and twice the
    time. A PodGroup waits without one until its first pod has a node, and then has it from there. A
    replacement has its own, by which launchers wait.
    """
    if view.status.replacing:
        return replacement.deadline(view.seats, view.now)
    since, seen = view.begun_at or view.now, view.feedback.seen_since
    since = max(since, seen or since)
    patience = timedelta(seconds=view.spec.startup_deadline)
    if pod_group.waits(view):
        return None
    if view.status.pod_group and (first := view.status.timings.placed_at):
        since = max(first, seen or first)
    if not view.seats.all_placed:
        return since + patience
    at = (pod.scheduled_at for pod in view.seats.members.values())
    placed = max((when for when in at if when is not None), default=since)
    return min(max(since, placed), since + patience) + patience


def late(view: View) -> bool:
    """Tell whether the deadline has passed before the whole gang runs."""
    starting = view.status.phase == "Starting" or view.status.replacing
    return starting and view.clock.reached(deadline(view)) and not view.seats.all_running


def advance(view: View, change: Change, stalls: Iterator[Stall]) -> Change:
    """Move on from Starting: to Running, back to Pending, or to a charged restart.

    A replacement gives nothing back: replacement.py ends it by its deadline.
    """
    seats = view.seats
    if view.status.replacing:
        return _run(seats, change, view.now) if seats.all_running else change
    if template_guard.why(view) and seats.missing:
        return restart.new_attempt(view, change, "Pending", 0)  # it cannot become whole
    if (group := pod_group.of(view)).refused:
        plain = pod_group.without(view.spec, group, change)
        return _release(view, change, plain) if isinstance(plain, Stall) else plain
    network, of_seats = view.network_refusal, view.refusals
    refused = [*of_seats.values(), *([network] if network else [])]
    # What cannot be, or not now, is given back at once, for others may need the room meanwhile.
    wrong = next((r for r in refused if r.code in (400, 422)), None)
    if wrong:
        pods = (f"pod {view.job.name}-{seat}" for seat, r in of_seats.items() if r is wrong)
        what = next(pods, "an object of the gang")
        what = f"{refusals.explained(wrong)}: the API server rejects {what}; {_CURE}"
        return _release(view, change, Stall(template_guard.POD_REFUSED, what), "Invalid")
    full = next((r for r in refused if refusals.quota_exceeded(r)), None)
    if full:
        # Quotas are asked only about valid objects.
        change = change.condition("Invalid", False, "Valid", "", view.now)
        return _release(view, change, Stall("QuotaExceeded", refusals.explained(full)))
    if seats.all_running:
        return _run(seats, change, view.now)
    # Anything else has time until the deadline, and a read since then shows who is there.
    if not late(view) or not seats.read_since(deadline(view)):
        return change
    if refused:
        return _release(view, change, refusals.stall(view.job, refused[0], view.clock))
    if seats.missing:
        what = f"replica {seats.missing[0]} was never created: the API server could not be reached"
        return _release(view, change, Stall("CreationFailed", what))
    leaving = evidence.leaving(seats.members.values())
    if leaving is not None and leaving.replica is not None:
        return restart.after(view, change, evidence.removed(leaving, view.now))
    waiting = [pod for pod in seats.members.values() if pod.unschedulable or not pod.node]
    if waiting:
        change = avoid.nothing(change, "no room elsewhere")
        first = pod_group.in_order(waiting)[0]
        return _release(view, change, refusals.no_room(first, avoid.words(view.status)))
    # All have a node, and one does not run: its machine is to blame, or else the program's start.
    silent = view.fence.suspect(seats.needed, late=True)
    slow = view.fence.failure(silent) if silent else _too_slow(seats, stalls, view.now)
    return restart.after(view, change, slow)


def _run(seats: Seats, change: Change, now: datetime) -> Change:
    replicas, status = seats.spec.replicas, seats.status
    timings, loss = status.timings, recovers_from(status)
    since = _last_sign(status, loss) if loss else timings.started_at or now
    seconds = max(0.0, (now - since).total_seconds())
    change = change.with_status(
        phase="Running",
        restarts=replace(change.status.restarts, released=0),
        timings=replace(timings, running_at=timings.running_at or now, replacing_since=None),
    )
    who = f"{every(replicas, 'replica')} of attempt {status.attempt}"
    message = f"{who} {'run' if replicas > 1 else 'runs'}"
    stalled = status.condition("Stalled")
    if stalled and stalled.reason != verdict.CRASH_LOOPING:  # running again does not end it
        change = change.condition("Stalled", False, "Running", "", now)
    change = change.condition("Running", True, "AllReplicasRunning", message, now)
    change = change.event("Normal", "Running", message)
    if timings.running_at:
        return change  # it ran all the time, while a standby pod was made
    if loss:
        took = replace(change.status.timings, last_recovery_seconds=round(seconds, 3))
        change = change.with_status(timings=took)
    measured = Measurement("recovery_seconds" if loss else "time_to_running_seconds", seconds)
    return change.measure(measured)


def _last_sign(status: Status, loss: Failure) -> datetime:
    """Return the last sign of progress, which may be long before the loss was decided.

    An exit code is seen at once, and a hand-over is no end. A step from before the previous loss
    does not count.
    """
    at_once = loss.exit_code is not None and loss.cls != "Hang"
    at_once = at_once or loss.reason == handover.HANDED_OVER
    reported = status.progress
    if at_once or reported.step is None or reported.updated_at is None:
        return loss.detected_at
    ends = [f.detected_at for f in status.failures if not f.in_place and f is not loss]
    old = max([*ends, status.timings.started_at or loss.detected_at])
    newer = reported.updated_at > old
    return min(reported.updated_at, loss.detected_at) if newer else loss.detected_at


def _too_slow(seats: Seats, stalls: Iterator[Stall], now: datetime) -> Failure:
    """Blame the first replica that does not run for the whole gang's delay."""
    on = seats.running | seats.succeeded
    replica = next(r for r in range(seats.spec.replicas) if r not in on)
    known = next((one.message for one in stalls), "no reason is known")
    if (pod := seats.members[replica]).awaits:
        known = initializing(pod.awaits)
    return replace(
        evidence.removed(pod, now),
        cls="Startup",
        reason="StartupDeadlineExceeded",
        message=f"not all replicas ran within {seats.spec.startup_deadline:.10g} s: {known}",
        exception=shorten(known),
    )


def _release(view: View, change: Change, why: Stall, condition: str = "Stalled") -> Change:
    """Delete the pods and wait: a new attempt, but no failure."""
    released = view.status.restarts.released + 1
    wait = _delay(view, released)
    change = restart.new_attempt(view, change, "Pending", wait)
    change = change.with_status(restarts=replace(change.status.restarts, released=released))
    did = "released all pods" if view.seats.pods else "no pod was made"
    what = f"{why.message}; {did}, next try in {wait:.0f} s"
    return change.stall(replace(why, message=what), view.now, condition)


def _delay(view: View, released: int) -> float:
    """Return the seconds before the next try: doubling, then 0.5 to 1.5 of that.

    A gang that had places for long without being whole may never be: in the end it rests for as
    long as it held them, so that half of the time is others', and its age does not hurry it.
    """
    timings = view.status.timings
    held = view.now - (timings.placed_at or timings.attempt_started_at or view.now)
    waited = view.now - (timings.started_at or view.now)
    share = held.total_seconds() * _SHARE_OF_HELD
    first = max(view.spec.restart.initial_seconds, share)
    # However short the backoff: gangs that take longer to start would meet again for ever.
    longest = min(_LONGEST, max(view.spec.restart.max_seconds, share))
    if held > _IN_VAIN and view.seats.any_placed:
        longest = max(longest, held.total_seconds())
    else:
        longest = max(min(_LONGEST_OF_OLD, longest), longest / (1.0 + max(0.0, waited / _OLD)))
    doublings = min(released - 1, 60)  # keeps floats finite
    return round(min(longest, first * 2.0**doublings) * (0.5 + view.chance()), 3)


def begin_job(view: View, change: Change) -> Change:
    """Begin after the creation or a resume; the active deadline counts from here."""
    resumed = view.status.parked and view.status.attempt > 0
    reason = "Resumed" if resumed else "Started"
    reason = "Admitted" if view.status.queued and view.job.queue else reason
    change = restart.new_attempt(view, change, "Restarting" if resumed else "Pending", 0)
    change = change.with_status(
        timings=replace(change.status.timings, started_at=view.now),
        restarts=replace(change.status.restarts, consecutive=0, released=0),
        handed_over=(),
    )
    change = avoid.nothing(change, f"the job was {reason.lower()}")
    message = f"creating {plural(view.spec.replicas, 'pod')}, attempt {change.status.attempt}"
    for type_ in ("Suspended", "Stalled"):
        change = change.condition(type_, False, reason, "", view.now)
    # The change of spec may have cured what was refused before.
    change = change.condition("Invalid", False, "Valid", "", view.now)
    change = change.event("Normal", reason, message)
    if not (scarce := view.spec.template.scarce):
        return change
    what = f"the trainer container has {scarce}: importing torch takes more, so it crawls or is"
    cure = "killed; raise them in spec.template, which may change while the job is suspended"
    return change.event("Warning", "TooFewResources", f"{what} {cure}")


def suspend(view: View, change: Change) -> Change:
    """End the pods, with their grace period for a snapshot unless the gang is broken."""
    change, message = broken(view, change, template_guard.why_suspended(view.spec, view.status))
    change = _park(view, change, "Suspended", "Suspended", message)
    change = change.condition("Stalled", False, "Suspended", "", view.now)
    return template_guard.suspended(view, change, message)


def hold(view: View, change: Change, words: str) -> Change:
    """End the pods in the same way, if any, and wait until Kueue admits the job."""
    if not view.status.queued:
        if not view.status.parked:
            change, words = broken(view, change, words)
        elif not template_guard.why(view):
            made_of = {"template_hash": view.spec.template_hash}
            change = change.with_status(**made_of, snapshot_hash=view.spec.snapshot_hash)
        change = _park(view, change, "Pending", kueue.QUEUED, words)
        change = change.event("Normal", kueue.QUEUED, words)
    reason = kueue.QUEUED if view.feedback.workloads is not None else kueue.UNAVAILABLE
    stall = next(barrier.undeleted(view), Stall(reason, words))  # it keeps the quota
    return change.condition("Stalled", True, stall.reason, stall.message, view.now)


def _park(view: View, change: Change, phase: str, reason: str, message: str) -> Change:
    change = change.with_status(
        phase=phase,
        members_since=view.status.attempt + 1,
        min_attempt_by_seat={},
        serving={},
        succeeded=frozenset(),
        timings=replace(
            view.status.timings, running_at=None, next_restart_at=None, replacing_since=None
        ),
    )
    return change.condition("Running", False, reason, message, view.now)


def broken(view: View, change: Change, what: str) -> tuple[Change, str]:
    """Name the failure that broke the gang before something else ends it, uncharged."""
    loss = cause.find(view)
    if loss is None:
        return change, what
    what = f"{what}; {template_guard.BROKEN}{describe(loss)}"
    return restart.record(view, change, loss), what
