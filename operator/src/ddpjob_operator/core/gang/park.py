"""Begin a job, or end its pods while it is suspended or waits in a queue.

plan() asks once it knows which of them is wanted. Pods that end so keep their grace period for a
snapshot; the time without pods counts for no deadline.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob_operator.core.capacity import queue, template_guard
from ddpjob_operator.core.failure_text import describe
from ddpjob_operator.core.gang import barrier, restart
from ddpjob_operator.core.loss import cause
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects.ranges import counted
from ddpjob_operator.core.view import Change, Stall, View


def begin(view: View, change: Change) -> Change:
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
    message = f"creating {counted(view.spec.replicas, 'pod')}, attempt {change.status.attempt}"
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
    change, message = broken(view, change, template_guard.why_suspended(view))
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
        change = _park(view, change, "Pending", queue.QUEUED, words)
        change = change.event("Normal", queue.QUEUED, words)
    reason = queue.QUEUED if view.feedback.workloads is not None else queue.UNAVAILABLE
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
    what = f"{what}; the gang was broken by then: {describe(loss)}"
    return restart.record(view, change, loss), what
