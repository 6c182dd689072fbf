"""Lets the oldest waiting gang start first when a ResourceQuota cannot hold all.

plan() and report.py ask. A gang needs all its places at once, so a stream of smaller ones would
starve it. Now and then, for a time that grows with its own wait, no later gang of the namespace
begins while it waits. A gang that fits nowhere has such turns too, and so may several: their turns
lie together, one has each, and most of the time is everybody's. Running and restarting gangs are
left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from ddpjob_operator.core.actions import Waiter
from ddpjob_operator.core.objects.json_read import mapping, parse_time, sequence
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.view import View

#: Phases of a gang that waits for quota, or tries once more.
_BEGINNING: Final = ("Pending", "Starting")

#: A cycle is as long as the gang has waited, or up to half of that: in the end the turn, its last
#: third, is longer than the jobs that are in the way, one day of three.
_LONGEST: Final = timedelta(days=3)
_SHORTEST: Final = _LONGEST / 128
#: Of a cycle; then comes the turn.
_EVERYBODYS: Final = 2 / 3
#: Cycles of one length begin together, whichever gangs wait, and two make one of the next length.
#: If each began with its gang's own wait, three gangs a day apart would take every day.
_FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)


def waiter(job: Job) -> Waiter | None:
    """Describe the job as others of its namespace see it while it waits for quota."""
    raw = mapping(job.status)
    told = (mapping(c) for c in sequence(raw.get("conditions")))
    true = {c.get("type"): c.get("reason") for c in told if c.get("status") == "True"}
    # What is invalid would not begin in its turn either.
    waits = true.get("Stalled") in ("QuotaExceeded", "WaitingForTurn") and "Invalid" not in true
    since = parse_time(mapping(raw.get("timings")).get("startedAt"))
    if not waits or since is None or job.deleting or raw.get("phase") not in _BEGINNING:
        return None
    return Waiter(since, job.uid, job.name)


def until(view: View) -> datetime | None:
    """Return when the turn of an earlier gang ends; None if this one may begin."""
    found = _before(view)
    return found[1] if found else None


def reasons(view: View) -> Iterator[tuple[str, str]]:
    """Name the gang that goes first."""
    found = _before(view)
    if found:
        waiter, end = found
        what = f"DDPJob {waiter.name} has waited for quota since {waiter.since:%Y-%m-%d %H:%M} UTC"
        yield "WaitingForTurn", f"{what}: until {end:%H:%M} UTC at most no later one begins"


def _before(view: View) -> tuple[Waiter, datetime] | None:
    """Find an earlier gang that starts first, and until when."""
    since, found = view.status.timings.started_at, _turn(view.feedback.waiters, view.now)
    if found is None or since is None or view.status.phase != "Pending":
        return None
    if view.status.restarts.consecutive:
        return None  # it restarts: a quota counts pods that are gone for a moment longer
    first = found[0]
    return found if (first.since, first.uid) < (since, view.job.uid) else None


def _turn(waiters: Sequence[Waiter], now: datetime) -> tuple[Waiter, datetime] | None:
    """Pick the gang that has waited longest, by rotation among equals, and the end of its turn."""
    cycles = [(_cycle(now - waiter.since), waiter) for waiter in waiters]
    turns = [(cycle, waiter) for cycle, waiter in cycles if cycle and _is_turn(cycle, now)]
    if not turns:
        return None
    longest = max(cycle for cycle, _ in turns)
    alike = [waiter for cycle, waiter in turns if cycle == longest]
    number, into = divmod(now - _FIRST, longest)
    return alike[number % len(alike)], now + (longest - into)


def _cycle(waited: timedelta) -> timedelta | None:
    """Return the cycle of a gang that has waited so long; None: it has no turns yet."""
    if waited < _SHORTEST:
        return None
    cycle = _LONGEST
    while cycle > waited:
        cycle /= 2
    return cycle


def _is_turn(cycle: timedelta, now: datetime) -> bool:
    return (now - _FIRST) % cycle >= _EVERYBODYS * cycle
