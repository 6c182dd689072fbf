"""Let one of several operators act on a job: status.operator names it by its Lease.

Operators with one Lease elect a leader. Those with different Leases, as of two releases for one
namespace, meet only here, and plan() calls it. One that finds the other's name does nothing but ask
for it, by status.operator.asked; the other one answers with a write. Without an answer it is dead,
and the one that asks takes the job over. It compares its clock with what it stamped itself, and
needs no right to read the other's Lease. Of three Leases, the two that wait need clocks that agree
to within AGAIN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_operator.core.actions import ApiFeedback, Plan, WriteStatus
from ddpjob_operator.core.change import Change, Clock, Stall
from ddpjob_operator.core.objects.json_read import format_time
from ddpjob_operator.core.objects.status import Status
from ddpjob_operator.core.view import View

OTHER: Final = "OtherOperator"
#: A dead leader has a successor by then: its Lease lasts 15 s, and a container starts.
PATIENCE: Final = timedelta(seconds=45)
#: One that has answered may die: it is asked again.
AGAIN: Final = timedelta(minutes=5)
#: One that asks no more is gone. Longer than AGAIN, or the report would flap.
FORGOTTEN: Final = timedelta(minutes=10)


def give_way(view: View, todo: Plan) -> Plan:
    """Return ``todo`` if the job is this operator's; else ask, wait, or take it over."""
    found, ours = view.status.operator, view.feedback.lease
    # After the end a write needs a reason: thousands of such jobs may be there.
    if not _foreign(view.status, view.feedback) or (view.status.terminal and not todo.actions):
        return todo
    patience = PATIENCE if found.other == ours and not found.answered else AGAIN
    left = found.asked + patience - view.now if found.asked else timedelta()
    if timedelta() < left <= patience:
        return Plan((), left.total_seconds())
    new = {"lease": found.lease, "version": found.version, "other": ours}
    new["asked"] = format_time(view.now)
    takes = found.other == ours and found.asked is not None and not found.answered
    if takes:
        new = {"lease": ours, "version": view.feedback.version}
    # All other fields stay as they are: they may be of another version.
    return Plan((WriteStatus({**view.job.status, "operator": new}, takes_over=takes),))


def answer(status: Status, known: ApiFeedback, clock: Clock, change: Change) -> Change:
    """Answer an operator that asks; forget one that has stopped asking."""
    found = status.operator
    if _foreign(status, known) or not known.lease or not found.asked:
        return change
    if not found.answered:
        return change.with_status(operator=replace(found, answered=clock.now))
    if clock.reached(_forgotten_at(status)):
        return change.with_status(operator=replace(found, other="", asked=None, answered=None))
    return change


def sign(feedback: ApiFeedback, change: Change) -> Change:
    """Put this operator's name into a status that is written anyway."""
    if not feedback.lease:
        return change
    named = replace(change.status.operator, lease=feedback.lease, version=feedback.version)
    return change.with_status(operator=named)


def _forgotten_at(status: Status) -> datetime | None:
    """Return when an operator that asks no more is forgotten."""
    at = status.operator.answered
    return None if at is None else at + FORGOTTEN


def stalls(status: Status, clock: Clock) -> Iterator[Stall]:
    """Report that operators of two Leases serve the job."""
    found = status.operator
    if found.other and not clock.reached(_forgotten_at(status)):
        what = f"operators of two Leases serve this namespace: that of {found.lease} acts, that of"
        cure = "give each release its own value namespaces, or uninstall one"
        yield Stall(OTHER, f"{what} {found.other} waits; {cure}")


def _foreign(status: Status, known: ApiFeedback) -> bool:
    ours, theirs = known.lease, status.operator.lease
    return bool(ours and theirs) and ours != theirs
