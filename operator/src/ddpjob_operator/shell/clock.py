"""The operator's one clock, and since when it has seen and acted without a gap.

Deadlines are stored as UTC, so the clock follows the machine's; but when that jumps it goes a
little faster or slower instead, or an hour set forward would run every deadline down at once. And
the start of a gang counts no time in which the operator saw nothing or led nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

log = logging.getLogger(__name__)

#: So much faster or slower than time passes, until it shows what the machine's clock shows.
_SLEW: Final = 0.1
#: A clock that is further off was never set before; following it slowly would take for ever.
_STEP: Final = timedelta(hours=12)


class Clock:
    """``heard()`` is called at each sign of life of the API server, within ``tolerance`` seconds.

    ``stepped()``: the time has been set; what was remembered with its time is of another one.
    """

    def __init__(
        self,
        tolerance: float = 60.0,
        *,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self._stepped = stepped
        self._wall, self._monotonic, self._tolerance = wall, monotonic, tolerance
        self._at, self._shown = monotonic(), wall()
        self._heard_at, self._seen_since = self._at, self._shown

    def now(self) -> datetime:
        """UTC; never goes back but when the machine's clock was set anew by half a day."""
        at, wall = self._monotonic(), self._wall()
        passed = timedelta(seconds=at - self._at)
        off = wall - (self._shown + passed)
        self._at = at
        if abs(off) > _STEP:
            log.warning("the clock was set by %.0f hours", off / timedelta(hours=1))
            self._shown = self._seen_since = wall
            self._stepped()
        else:
            self._shown += passed + max(-passed * _SLEW, min(off, passed * _SLEW))
        return self._shown

    def heard(self) -> None:
        """The API server has just told something."""
        if self._blind():
            self.interrupted()
        self._heard_at = self._monotonic()

    def interrupted(self) -> None:
        """Until this moment somebody else, or nobody, has acted."""
        self._seen_since = self.now()

    def seen_since(self) -> datetime:
        """Since when this process has seen and acted without a gap; now, while it sees nothing."""
        if self._blind():
            self.interrupted()
        return self._seen_since

    def _blind(self) -> bool:
        return self._monotonic() - self._heard_at > self._tolerance
