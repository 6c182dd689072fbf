"""Merge what launchers report of progress, and say whose snapshot training began from.

report/conditions.py merges with each poll, gang/finish.py at the end. loss/verdict.py asks whether
training got further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from typing import Final

from ddpjob_operator.core.change import Change
from ddpjob_operator.core.objects.observe import Pod, Report
from ddpjob_operator.core.objects.status import Progress, Restarts, Status

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
