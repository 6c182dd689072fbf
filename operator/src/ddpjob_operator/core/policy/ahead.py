"""Stored times that lie far ahead, or are missing: a clock was wrong, or somebody took them away.

What counts from them (deadlines, healing, the time to live) would not run down before that day, or
never. So they become now, once. The clocks of two operators may differ by less: then a time that
lies ahead only runs down later, and nothing earlier than it should.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_contract.crd import TERMINAL_PHASES
from ddpjob_operator.core.status import Status, Timings

#: shell/clock.py takes a machine's clock that is set by more for one that was never set before.
FAR: Final = timedelta(hours=12)

#: No delay between restarts is longer: spec.restart.backoff's maximum.
LONGEST_DELAY: Final = timedelta(days=1)


def restored(status: Status, now: datetime) -> Timings:
    """With what each phase has from its first moment on; the same if nothing is missing."""
    timings = status.timings
    if status.phase in TERMINAL_PHASES:
        return replace(timings, completed_at=timings.completed_at or now)
    if status.phase in (None, "Suspended") or status.attempt == 0:
        return timings  # a start is to come, and begins them all
    return replace(
        timings,
        started_at=timings.started_at or now,
        attempt_started_at=timings.attempt_started_at or now,
        running_at=timings.running_at or (now if status.phase == "Running" else None),
    )


def mended(timings: Timings, now: datetime) -> Timings:
    """Return the same object if no time lies far ahead."""

    def here(at: datetime | None) -> datetime | None:
        return now if at is not None and at > now + FAR else at

    since, until = timings.attempt_started_at, timings.next_restart_at
    if since and until and here(since) is now:
        until = now + (until - since)
    if until and until > (here(since) or now) + LONGEST_DELAY:
        until = now
    return replace(
        timings,
        started_at=here(timings.started_at),
        attempt_started_at=here(since),
        running_at=here(timings.running_at),
        last_round_at=here(timings.last_round_at),
        next_restart_at=until,
        completed_at=here(timings.completed_at),
    )
