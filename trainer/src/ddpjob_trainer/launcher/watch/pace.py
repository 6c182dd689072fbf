"""Reckon steps per second, of the records of the library or of what a program prints."""

from __future__ import annotations

from typing import Final

from ddpjob_trainer.liveness.heartbeat import RankState

_WINDOW_SECONDS: Final = 60.0


class Pace:
    """A round's steps per second in the last minute, or of the last two slower changes."""

    def __init__(self) -> None:
        self._marks: tuple[tuple[float, int], ...] = ()  # when a step was first seen, oldest first

    def poll(self, state: RankState | None, now: float) -> None:
        """Take in a worker's record."""
        if state is None or state.phase == "startup":
            return
        self.count(state.step, now)

    def count(self, step: int, now: float) -> None:
        """Take in a count of steps; one that falls begins again."""
        marks = self._marks
        if marks and step < marks[-1][1]:
            marks = ()
        if not marks or marks[-1][1] != step:
            marks = (*marks, (now, step))
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
