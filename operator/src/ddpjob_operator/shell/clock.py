"""Tell the operator's time, and since when it has seen and acted without gap.

Deadlines are stored as UTC, so the clock is the machine's. The start of a gang counts no time from
before that was set, and none in which the operator saw nothing or led nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

log = logging.getLogger(__name__)

#: Between two looks the clock and time itself differ by more only if the clock was set.
_SET: Final = timedelta(seconds=5)


class Clock:
    """``received(namespace)`` is called at each sign of life of the API server about a namespace.

    Within ``tolerance`` seconds; ``namespaces`` are those with a sight of their own, None all that
    have none. ``stepped()``: the time has been set; what was remembered with its time is of another
    one.
    """

    def __init__(
        self,
        tolerance: float = 60.0,
        *,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
        stepped: Callable[[], None] = lambda: None,
        namespaces: Sequence[str] = (),
    ) -> None:
        self._stepped = stepped
        self._wall, self._monotonic, self._tolerance = wall, monotonic, tolerance
        self._at, self._shown = monotonic(), wall()
        served = namespaces or (None,)
        self._received_at: dict[str | None, float] = dict.fromkeys(served, self._at)
        self._seen_since: dict[str | None, datetime] = dict.fromkeys(served, self._shown)

    def now(self) -> datetime:
        """Return UTC."""
        at, wall = self._monotonic(), self._wall()
        off = wall - self._shown - timedelta(seconds=at - self._at)
        self._at, self._shown = at, wall
        if abs(off) > _SET:
            log.warning("the clock was set by %.0f s", off.total_seconds())
            self._count_from_now()
            self._stepped()
        return wall

    def received(self, namespace: str | None = None) -> None:
        """Note what the API server has just said of its time."""
        self.seen_since(namespace)
        self._received_at[self._served(namespace)] = self._monotonic()

    def interrupted(self) -> None:
        """Note that somebody else, or nobody, has acted until this moment."""
        self.now()
        self._count_from_now()

    def seen_since(self, namespace: str | None = None) -> datetime:
        """Return since when this process has seen it and acted without a gap. Without sight: now.

        What cannot be seen of one namespace is no gap in another's sight.
        """
        served = self._served(namespace)
        if self._monotonic() - self._received_at[served] > self._tolerance:
            self._seen_since[served] = self.now()
        return self._seen_since[served]

    def _served(self, namespace: str | None) -> str | None:
        return namespace if namespace in self._received_at else None

    def _count_from_now(self) -> None:
        self._seen_since = dict.fromkeys(self._seen_since, self._shown)
