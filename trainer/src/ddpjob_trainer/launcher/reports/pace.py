"""Measure how many steps per second a worker makes, for GET /state.

The supervisor's loop looks at that worker's record once a second; a thread that serves HTTP asks.
The marks kept are bounded, and the rate of a worker that hangs falls.
"""

from __future__ import annotations

from typing import Final

from ddpjob_trainer.liveness.heartbeat import RankState

_WINDOW_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 1.0


class Pace:
    """The steps per second of the last minute, or of the last two slower changes."""

    def __init__(self) -> None:
        self._marks: tuple[tuple[float, int], ...] = ()  # when a step was first seen, oldest first
        self._polled = 0.0

    def begin(self) -> None:
        """Start over with a round."""
        self._marks = ()

    def is_due(self, now: float) -> bool:
        """Return whether the next look is due."""
        return now - self._polled >= _POLL_SECONDS

    def poll(self, state: RankState | None, now: float) -> None:
        """Take in a worker's record."""
        self._polled = now
        if state is None or state.phase == "startup":
            return
        marks = self._marks
        if not marks or marks[-1][1] != state.step:
            marks = (*marks, (now, state.step))
        while len(marks) > 2 and marks[1][0] <= now - _WINDOW_SECONDS:
            marks = marks[1:]
        self._marks = marks

    def per_second(self, now: float) -> float | None:
        """Return the rate, None before two changes."""
        marks = self._marks
        if len(marks) < 2:
            return None
        rate = (marks[-1][1] - marks[0][1]) / (now - marks[0][0])
        return float(f"{rate:.4g}")
