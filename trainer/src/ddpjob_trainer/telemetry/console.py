"""Show a run to people: a bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR_WIDTH = 24
_REDRAW_SECONDS = 0.1
_CLEAR = "\x1b[K"  # to the end of the line


class Display:
    """Rank 0's display. ``columns`` of the terminal; 0: no terminal, hence no bar."""

    def __init__(
        self,
        total_steps: int,
        *,
        columns: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._columns = columns
        self._stream = stream
        self._clock = clock
        self._due = 0.0
        self._rate = 0.0
        self._drawn = False

    def line(self, step: int, loss: float, rate: float, snapshot_step: int) -> None:
        """Show a step every few steps, and at the end. ``rate``: samples per second."""
        self._rate = rate
        if self._columns:
            self._due = 0.0
            self.step(step, loss, snapshot_step)
            if step == self.total_steps:
                self.close()
            return
        self._put(f"{self._text(step, loss, snapshot_step)}\n")

    def step(self, step: int, loss: float, snapshot_step: int) -> None:
        """Show any other step."""
        if not self._columns:
            return
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _REDRAW_SECONDS
        done = _BAR_WIDTH * step // self.total_steps
        bar = "#" * done + "-" * (_BAR_WIDTH - done)
        text = f"[{bar}] {self._text(step, loss, snapshot_step)}"[: self._columns - 1]
        # The carriage return comes last: the next print begins on this line, and the launcher
        # passes whole lines on.
        self._put(f"{text}{_CLEAR}\r")
        self._drawn = True

    def close(self) -> None:
        """Keep the last bar on the terminal."""
        if self._drawn:
            self._drawn = False
            self._put("\n")

    def _text(self, step: int, loss: float, snapshot_step: int) -> str:
        tail = f" snapshot {snapshot_step}" if snapshot_step >= 0 else ""
        return f"step {step}/{self.total_steps} loss {loss:.4f} {self._rate:,.0f} samples/s{tail}"

    def _put(self, text: str) -> None:
        print(text, end="", flush=True, file=self._stream or sys.stdout)


def say(rank: int, text: str) -> None:
    """Print one line to the log of this rank."""
    who = f"rank {rank}: " if rank else ""
    print(f"ddpjob: {who}{text}", file=sys.stderr, flush=True)
