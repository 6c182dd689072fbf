"""Reset the budgets of restarts after progress, or after a time without failure.

plan() asks in each planning round. Progress is a newer snapshot of ours or, for programs with their
own files, a newer mtime at spec.restart.progressPath. Without either, time alone heals:
spec.restart.healAfterSeconds of a gang that runs. Both are measured against the stored status
(restarts, timings). The first value heard may be older than the job, so later ones have to be newer
than that.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_operator.core.objects.status import Restarts, Status
from ddpjob_operator.core.view import Change, View


def budgets(view: View, change: Change) -> Change:
    """Give back the charges once there is a reason to; else change nothing."""
    if not _spent(change.status.restarts):
        return change
    old = _marked(view, change.status.restarts)
    change = change.with_status(restarts=old)
    why = _reason(view, change.status)
    if why is None:
        return change
    change = change.with_status(restarts=replace(old, charged=0, disruptions=0, consecutive=0))
    spent = f"spent until now: {old.charged} restarts charged, {old.disruptions} disruptions"
    return change.event("Normal", "BudgetHealed", f"{why}: the budget is whole again; {spent}")


def due(view: View, status: Status) -> datetime | None:
    """Return when time alone heals; None with nothing to heal or an incomplete gang.

    Any failure, one of a round too, restarts the wait. Times are the operator's.
    """
    seconds, timings = view.spec.restart.heal_after, status.timings
    if not seconds or not _spent(status.restarts):
        return None
    # The operator may have been away before it found the gang broken, so a broken gang does not
    # count. Only a gang in phase Running has a running_at.
    if timings.running_at is None or not view.all_running:
        return None
    since = max(timings.running_at, timings.last_round_at or timings.running_at)
    return since + timedelta(seconds=seconds)


def _marked(view: View, restarts: Restarts) -> Restarts:
    """Store the first values heard: a job that had reported without one began with none."""
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
    if view.reached(due(view, status)):
        return f"{view.spec.restart.heal_after} s without a failure"
    return None


def _spent(restarts: Restarts) -> bool:
    return restarts.charged > 0 or restarts.disruptions > 0
