"""Reports the resume of a job: whose snapshot it took, and whether its restart was proven.

report.py and finish.py call it with the progress that a launcher reports.
"""

from __future__ import annotations

from ddpjob_operator.core.objects import resumed
from ddpjob_operator.core.objects.status import Progress, with_condition
from ddpjob_operator.core.view import Change, View


def began_from(view: View, change: Change, progress: Progress) -> Change:
    """Report once that a snapshot is another job's, or was made by another program."""
    said = progress.resumed
    if said in ("", view.status.progress.resumed):
        return change
    if not said.startswith(resumed.OF_ANOTHER):
        return change.tell("Normal", "ProgramChanged", f"training goes on from what was {said}")
    cure = "to train anew apply it under another name, or with spec.snapshot.resume: Never"
    return change.tell("Warning", "OtherSnapshots", f"training goes on from {said}; {cure}")


def proven(view: View, change: Change) -> Change:
    """Report whether the newest restart was proven; without news the condition stays."""
    progress = view.feedback.progress
    found = progress.proof if progress is not None else None
    if found is None:
        return change
    reason = "StepsRepeatedEqual" if found.equal else "StepsDiffer"
    old = change.status.condition("ResumeProven")
    conditions = with_condition(  # False too where it never was true
        change.status.conditions, "ResumeProven", found.equal, reason, found.message, view.now
    )
    change = change.with_status(conditions=conditions)
    if old is not None and old.reason == reason and (found.equal or old.message == found.message):
        return change
    return change.tell("Normal" if found.equal else "Warning", reason, found.message)
