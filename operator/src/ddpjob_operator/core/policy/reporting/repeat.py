"""Report a program that fails again and again, in whatever phase the gang is.

plan() asks in each planning round; the answer comes from the newest failures of the status, those
of rounds included. restart.py decides what follows from each.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from ddpjob_contract.exits import FREE
from ddpjob_operator.core import told
from ddpjob_operator.core.objects.status import Failure, Status
from ddpjob_operator.core.view import View

CRASH_LOOPING: Final = "CrashLooping"
#: A loop is so many failures within so short a time, and ends after so long without one. Both
#: bounds are longer than the longest wait of restart.py between two attempts, or it would flap.
_FAILURES: Final = 3
_RATE: Final = timedelta(minutes=15)
_QUIET: Final = timedelta(minutes=10)


def reasons(view: View, status: Status) -> Iterator[tuple[str, str]]:
    """Explain why the job is not well though its gang may run at this moment."""
    until, counted = quiet_at(status), _of_program(status)
    if until is None or view.now >= until:
        return
    newest = counted[-1]
    counted = [one for one in counted if newest.detected_at - one.detected_at <= _RATE]
    took = max(1.0, (newest.detected_at - counted[0].detected_at).total_seconds() / 60)
    rounds = sum(one.in_place for one in counted)
    often = f"{len(counted)} failures within {took:.0f} min, {rounds} of them restarted in place"
    alike = {one.exception for one in counted} == {newest.exception}
    said = f", each with {newest.exception}" if newest.exception and alike else ""
    cure = "spec.suspend true stops it and keeps the snapshots"
    yield CRASH_LOOPING, f"{often}{said}; last: {told.describe(newest)}; {cure}"


def quiet_at(status: Status) -> datetime | None:
    """Return when the loop ends if nothing fails any more; None without a loop."""
    counted = _of_program(status)[-_FAILURES:]
    if len(counted) < _FAILURES or counted[-1].detected_at - counted[0].detected_at > _RATE:
        return None
    return counted[-1].detected_at + _QUIET


def _of_program(status: Status) -> list[Failure]:
    """List the program's failures since the start or resume, which may have cured older ones."""
    since = status.timings.started_at
    charged = [one for one in status.failures if one.cls not in FREE]
    return [one for one in charged if since is None or one.detected_at >= since]
