"""When the budgets of restarts are whole again: with progress, or after time without failure.

Progress is a newer snapshot of ours or, for programs that keep their own files, a newer mtime
at spec.restart.progressPath. Where neither is seen, time alone heals: spec.restart.healAfterSeconds
of a gang that runs. Nothing is remembered between plans: what is newer than status.restarts knew
when the budget was last charged is progress, and time is counted from the stored status.timings.
What is heard first may be older than the job, so it is what later ones are to be newer than.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_operator.core.policy import startup
from ddpjob_operator.core.status import Restarts, Status
from ddpjob_operator.core.view import Change, View


def budgets(view: View, change: Change) -> Change:
    """Give back what was charged, once there is a reason to; no change where nothing was."""
    if not _spent(change.status.restarts):
        return change
    old = _marked(view, change.status.restarts)
    change = change.with_status(restarts=old)
    why = _reason(view, change.status)
    if why is None:
        return change
    change = change.with_status(restarts=replace(old, charged=0, disruptions=0, consecutive=0))
    spent = f"restarts charged: {old.charged}, disruptions: {old.disruptions}"
    return change.tell("Normal", "BudgetHealed", f"{why}: the budget is whole again ({spent})")


def due(view: View, status: Status) -> datetime | None:
    """When time alone heals; None if there is nothing to heal or the gang does not run whole.

    A failure starts the wait anew, one that only ended a round too. Times are the operator's.
    """
    seconds, timings = view.spec.restart.heal_after, status.timings
    if not seconds or not _spent(status.restarts):
        return None
    # How long a gang ran before it was found broken nobody knows: the operator may have been away.
    # Only a gang in phase Running has a running_at.
    if timings.running_at is None or not startup.all_running(view):
        return None
    since = max(timings.running_at, timings.last_round_at or timings.running_at)
    return since + timedelta(seconds=seconds)


def _marked(view: View, restarts: Restarts) -> Restarts:
    """With what is heard first. Whoever told of steps, or at all, had no snapshot, or no file."""
    heard, marks = view.status.progress, restarts
    if not marks.snapshot_step and heard.step is None:
        marks = replace(marks, snapshot_step=view.snapshot_step)
    if marks.file_at is None and heard.updated_at is None:
        marks = replace(marks, file_at=view.file_at)
    return marks


def _reason(view: View, status: Status) -> str | None:
    marks, file_at = status.restarts, view.file_at
    if view.snapshot_step > marks.snapshot_step:
        return f"a newer snapshot, of step {view.snapshot_step}"
    if file_at and (marks.file_at is None or file_at > marks.file_at):
        return "spec.restart.progressPath was written"
    end = due(view, status)
    if end is not None and view.now >= end:
        return f"{view.spec.restart.heal_after} s without a failure"
    return None


def _spent(restarts: Restarts) -> bool:
    return restarts.charged > 0 or restarts.disruptions > 0
