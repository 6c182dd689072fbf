"""Tell what a gang that trains has done after some seconds: story.py and formulas.py ask.

Steps and snapshots come in a fixed rhythm from the first step on, so nothing is simulated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kubectl_ddp.planning.parts import Parts


@dataclass(frozen=True, slots=True)
class Done:
    """Steps and snapshots since the gang began to step."""

    steps: int
    durable: int  # steps that a durable snapshot has
    stalled: float  # seconds


class Cycle:
    """First ``first`` steps and a snapshot, then ``later`` steps and one, again and again.

    A snapshot that is due while another is written is left out, so later ones may be rarer.
    """

    def __init__(self, parts: Parts) -> None:
        self.step, self.stall, self.write = parts.step, parts.stall, parts.write
        self.first = parts.every_steps
        self.later = self.first * max(1, math.ceil(parts.write / (self.first * self.step)))
        self.first_seconds = self.first * self.step + self.stall
        self.later_seconds = self.later * self.step + self.stall

    def after(self, seconds: float) -> Done:
        """Tell what is done after ``seconds``."""
        if seconds < self.first_seconds:
            steps = min(self.first, _whole(seconds / self.step))
            return Done(steps, 0, max(0.0, seconds - self.first * self.step))
        later = seconds - self.first_seconds
        whole = _whole(later / self.later_seconds)
        rest = max(0.0, later - whole * self.later_seconds)
        before = self.first + whole * self.later
        steps = min(self.later, _whole(rest / self.step))
        stalled = (1 + whole) * self.stall + max(0.0, rest - self.later * self.step)
        newest = before if rest >= self.write else max(0, before - self.later)
        return Done(before + steps, newest, stalled)

    def until(self, steps: int) -> float:
        """Return the seconds until ``steps`` are done, but for the snapshot after the last."""
        if steps <= self.first:
            return steps * self.step
        return steps * self.step + (1 + (steps - self.first - 1) // self.later) * self.stall


def _whole(number: float) -> int:
    """Round down; what the last bits make too little by is none the less whole."""
    return int(number + 1e-9)
