"""Decide when a status that was worked out is stored: decisions at once, reports now and then."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final

from ddpjob_operator.core import actions, operators
from ddpjob_operator.core.actions import Plan
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.status import (
    Status,
)
from ddpjob_operator.core.report import ledger
from ddpjob_operator.core.view import Change, View

#: Status writes that only report are held back until this long after the last write.
REPORT_INTERVAL: Final = timedelta(seconds=2)
#: The same for a gang that has run for 20 minutes: a thousand such jobs write 17 times a second.
PROGRESS_INTERVAL: Final = timedelta(seconds=60)


def write(view: View, change: Change) -> Plan | None:
    """Plan to store the status; None if there is nothing to store right now."""
    new, old = st.to_dict(change.status), st.to_dict(view.status)
    sent, stored = view.feedback.pruned or ({}, None)
    if new == old or (st.decided(new) == st.decided(sent) and stored == view.job.status):
        return None  # what an older CRD drops would be written for ever
    if _reports_only(change.status, view.status):
        last = view.feedback.status_written_at
        progress = replace(view.status, progress=change.status.progress) == change.status
        interval = _seldom(view) if progress else REPORT_INTERVAL
        if last is not None and not view.reached(last + interval):
            return None
    begins = change.status.phase == "Starting" != view.status.phase
    change = operators.sign(view, ledger.book(view, change))  # with what is written anyway
    new = st.to_dict(change.status)
    return Plan((actions.WriteStatus(new, change.events, change.measurements, begins),))


def _seldom(view: View) -> timedelta:
    """Return the time between writes of progress: the longer the gang has run, the longer."""
    written = view.feedback.status_written_at or view.now
    age = written - (view.status.timings.running_at or written)
    return max(REPORT_INTERVAL, min(PROGRESS_INTERVAL, age / 20))


def _reports_only(new: Status, old: Status) -> bool:
    """Tell whether only counts, progress or a stall differ.

    A success is stored before its pod may go. Two operators that both act for a moment may report a
    stall in turns; only its first report is written at once.
    """

    def decided(status: Status) -> Status:
        rest = replace(
            status, replicas=st.Replicas(), progress=st.Progress(), waiting_for_replacement=False
        )
        rest = replace(rest, serving={})
        if old.condition("Stalled") is None:
            return rest
        told = tuple(c for c in status.conditions if c.type != "Stalled")
        return replace(rest, conditions=told, reason="", message="")

    return decided(new) == decided(old) and new.replicas.succeeded == old.replicas.succeeded
