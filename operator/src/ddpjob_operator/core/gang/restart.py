"""Turn a member's loss into a new attempt or the job's end, by budgets.

plan() calls after() with the loss that cause.py found; replacement.py says whether the new attempt
keeps the pods that were not lost. A charged restart is the user's doing and counts
against maxRestarts; a free one (disruption, infrastructure, hardware) against maxDisruptions.
verdict.py gives both back.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.capacity import pod_group, template_guard
from ddpjob_operator.core.change import Change
from ddpjob_operator.core.failure_text import describe, replicas
from ddpjob_operator.core.gang import finish, replacement
from ddpjob_operator.core.loss import cause, verdict
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects.status import MAX_FAILURES, Failure, Status, Timings
from ddpjob_operator.core.view import View


def after(
    view: View, change: Change, loss: Failure, planned: frozenset[int] = frozenset()
) -> Change:
    """Record the loss, then start a new attempt or fail, as rules and budgets say.

    ``planned``: replicas that handover.py replaces before they are lost.
    """
    # What was lost with a pod that is counted already is counted with it.
    if cause.is_same_incident(view.status, loss, view.now):
        return _join(view, change, loss)
    last = verdict.ends(view, change.status, loss)
    if last is not None:
        return finish.fail(view, record(view, change, loss), *last)
    # What the program has done is charged, by the user's rule or its class; the rest is disruption.
    free = verdict.action(view, change.status.restarts, loss) == "RestartFree"
    restarts, limits = verdict.count(view, change.status.restarts, free), view.spec.restart
    # A gang that fails before its first step is not tried in a hurry: what it lacks takes minutes.
    delay, early = verdict.backoff(view.spec, restarts.consecutive), 0.0
    if not (free or verdict.has_trained(view) or cause.has_waited(view.status, loss)):
        row = min(restarts.consecutive, restarts.charged)
        early = verdict.backoff(view.spec, row, verdict.STARTUP_SECONDS)
    if free:
        loss = replace(loss, charged_to="maxDisruptions", charge=restarts.disruptions)
        count = f"disruption {restarts.disruptions} of at most {limits.max_disruptions}"
    else:
        loss = replace(loss, charged_to="maxRestarts", charge=restarts.charged)
        count = f"restart {restarts.charged} of at most {limits.max_restarts}"
    count += "; no step was reported, so delays between restarts are longer" * (early > delay)
    delay = max(delay, early)
    if pod_group.preempted(view.seats, loss):
        delay = max(delay, pod_group.PREEMPTED_SECONDS)
    wait = f" in {delay:g} s" if delay else ""
    # Launchers wait for a lost pod only so long: after a longer delay all restart.
    gone = replacement.to_replace(view, loss, delay, planned)
    if gone:
        restarts = replace(restarts, replaced=restarts.replaced + 1)
        loss = replace(loss, replaced=True)
    change = record(view, change, loss).with_status(restarts=restarts)
    change = avoid.node_of(view.spec, change, loss)
    change = change.measure(Measurement("restarts_total", 1, loss.cls))
    if gone:
        what = f"{describe(loss)}; replacing {replicas(gone, 40)}{wait} ({count})"
        reason = loss.reason if planned else "Replacing"
        return replacement.begin(view, change, gone, what, delay, reason=reason)
    message = f"attempt {view.status.attempt} ended: {describe(loss)}; restarting{wait} ({count})"
    return _restarting(view, change, "Restarting", message, delay)


def restart_all(view: View, change: Change, reason: str, message: str) -> Change:
    """Restart the whole gang, uncharged: in place of a replacement, whose loss is counted."""
    return _restarting(view, change, reason, f"{message}; restarting all pods", _delay_left(view))


def _join(view: View, change: Change, loss: Failure) -> Change:
    """Replace a pod of the same incident, too, or restart all if nobody waits."""
    delay = _delay_left(view)
    gone = replacement.to_replace(view, loss, delay)
    if not gone:
        return restart_all(view, change, "Restarting", f"no other pod waits: {describe(loss)}")
    what = f"{describe(loss)}, of the same incident; replacing {replicas(gone, 40)}"
    return replacement.begin(view, change, gone, what, delay)


def _restarting(view: View, change: Change, reason: str, message: str, delay: float) -> Change:
    change = new_attempt(view, change, "Restarting", delay)
    change = change.condition("Running", False, reason, message, view.now)
    return change.event("Warning", reason, message)


def record(view: View, change: Change, loss: Failure) -> Change:
    """Record the failure that ended the attempt, with its measurements."""
    # Its pod may be of an earlier attempt than the one that it ended.
    loss = replace(loss, attempt=view.status.attempt)
    failures = (*change.status.failures, loss)[-MAX_FAILURES:]
    member = view.seats.members.get(loss.replica)
    if member and member.trainer.finished_at:
        # Two clocks: good for a metric, never for a decision.
        seconds = (view.now - member.trainer.finished_at).total_seconds()
        change = change.measure(Measurement("detection_seconds", max(0.0, seconds)))
    report = member.trainer.report if member else None
    if report and report.step is not None:
        lost = max(0, report.step - view.reported.snapshot_step)
        change = change.measure(Measurement("lost_steps", lost))
        old = change.status.progress
        if report.step > 0 and not view.reported.snapshot_step and old.step is None:
            # No poll has reported a step: verdict.py asks whether there was a snapshot before.
            change = change.with_status(progress=replace(old, step=report.step))
    return change.with_status(failures=failures)


def new_attempt(view: View, change: Change, phase: str, delay: float) -> Change:
    """Record the intent of a new attempt: pods of older ones are no members now."""
    attempt = view.seats.next_attempt
    # A template that new pods may not be made of is not taken for theirs.
    made_of = view.status if template_guard.why(view) else view.spec
    return change.with_status(
        phase=phase,
        attempt=attempt,
        members_since=attempt,
        min_attempt_by_seat={},
        can_wait_for_replacement=False,  # another program may not wait
        serving={},
        template_hash=made_of.template_hash,
        snapshot_hash=made_of.snapshot_hash,
        succeeded=frozenset(),
        restarts=replace(change.status.restarts, round=0),
        replicas=replace(view.status.replicas, active=0, ready=0, succeeded=0, failed=0),
        timings=Timings(
            started_at=view.status.timings.started_at or view.now,
            attempt_started_at=view.now,
            next_restart_at=view.now + timedelta(seconds=delay) if delay else None,
            last_recovery_seconds=view.status.timings.last_recovery_seconds,
        ),
    )


def delayed_until(status: Status, begun_at: datetime | None) -> datetime | None:
    """Return when the delay before the new attempt is over; None without one.

    Counted from when the attempt began: another clock may have stored a time far ahead.
    """
    since, until = status.timings.attempt_started_at, status.timings.next_restart_at
    return begun_at + (until - since) if begun_at and since and until else None


def _delay_left(view: View) -> float:
    """Return the seconds that are left of that delay."""
    at = delayed_until(view.status, view.begun_at)
    return max(0.0, (at - view.now).total_seconds()) if at else 0.0
