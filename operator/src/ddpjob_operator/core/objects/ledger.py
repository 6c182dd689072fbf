"""Define status.ledger: where the job's pod-seconds have gone, as sums.

core/report/ledger.py books into it whenever the status is written; `kubectl ddp account` shows it.
Observe.py reads a launcher's own account here, which is a stranger's: bounded, or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, get_type_hints

from ddpjob_contract import LEDGER_STATES, Spent
from ddpjob_contract.exits import SEVERITY
from ddpjob_operator.core.objects.json_read import (
    counter,
    format_time,
    mapping,
    opt_number,
    parse_time,
)

UP: Final = "up"
#: Causes of recoveries: classes of failures, a planned round, and one that is not known yet.
DRILL: Final = "Drill"
UNKNOWN: Final = "Unknown"
CAUSES: Final = (*SEVERITY, "Startup", DRILL, UNKNOWN)
_MOST: Final = 1e13
_LONGEST: Final = 1e9  # seconds of a launcher's life: a stranger's word must not overflow a time
_DIGITS: Final = 3
_SPENT: Final = tuple(get_type_hints(Spent))


@dataclass(frozen=True, slots=True)
class LauncherAccount:
    """A launcher's account of its life, in seconds of that machine's clock (contract.Spent).

    ``at``: when the operator reported it; None: last words, which a container's end holds.
    """

    hub: int
    seconds: Mapping[str, float]
    at: datetime | None = None

    @property
    def up(self) -> float:
        """Return how long the launcher had run."""
        return self.seconds.get(UP, 0.0)

    @property
    def booked(self) -> dict[str, float]:
        """Return what its time went to; the rest is a step under way."""
        return {name: value for name, value in self.seconds.items() if name != UP}


@dataclass(frozen=True, slots=True)
class Ledger:
    """Pod-seconds from ``since`` to ``until``, by state and, of recoveries, by cause.

    ``hub``: the number of the launcher whose account is in them up to ``hub_seconds``; by the
    operator's clock it started at ``hub_at``.
    """

    since: datetime | None = None
    until: datetime | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    recovering: Mapping[str, float] = field(default_factory=dict)
    hub: int = 0
    hub_at: datetime | None = None
    hub_seconds: Mapping[str, float] = field(default_factory=dict)


def read_account(raw: object, hub: int, at: datetime | None = None) -> LauncherAccount | None:
    """Parse contract.Spent; None if it says nothing."""
    found = _sums(raw, _SPENT)
    sane = UP in found and max(found.values()) <= _LONGEST
    return LauncherAccount(hub, found, at) if sane else None


def from_dict(raw: object) -> Ledger:
    """Parse status.ledger; what does not parse counts as absent."""
    body = mapping(raw)
    hub = mapping(body.get("hub"))
    return Ledger(
        since=parse_time(body.get("since")),
        until=parse_time(body.get("until")),
        seconds=_sums(body.get("podSeconds"), LEDGER_STATES),
        recovering=_sums(body.get("recovering"), CAUSES),
        hub=counter(hub.get("attempt")),
        hub_at=parse_time(hub.get("startedAt")),
        hub_seconds=_sums(hub.get("seconds"), _SPENT),
    )


def to_dict(ledger: Ledger) -> dict[str, Any] | None:
    """Return the JSON form; None of a ledger that has not begun."""
    if ledger.since is None or ledger.until is None:
        return None
    found: dict[str, Any] = {
        "since": format_time(ledger.since),
        "until": format_time(ledger.until),
        "podSeconds": _rounded(ledger.seconds),
        "recovering": _rounded(ledger.recovering),
    }
    if ledger.hub_at is not None:
        found["hub"] = {
            "attempt": ledger.hub,
            "startedAt": format_time(ledger.hub_at),
            "seconds": _rounded(ledger.hub_seconds),
        }
    return found


def _sums(raw: object, names: tuple[str, ...]) -> dict[str, float]:
    body = mapping(raw)
    numbers = ((name, opt_number(body.get(name))) for name in names)
    return {n: value for n, value in numbers if value is not None and 0 <= value <= _MOST}


def _rounded(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, _DIGITS) for name, value in sums.items() if value}
