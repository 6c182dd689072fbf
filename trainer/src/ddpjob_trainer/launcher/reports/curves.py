"""Keep some points a round of rank 0's loss and own numbers, for the evidence.

The Keeper of evidence.py adds what it sees each second; pages for people draw it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_NAMES: Final = 9
_POINTS: Final = 100  # of a number, about evenly spread: an incident of 20 rounds stays small


@dataclass(slots=True)
class _Curve:
    kept: list[list[float]] = field(default_factory=list)
    apart: int = 1  # steps
    newest: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        self.newest = [step, float(f"{value:.6g}")]
        if not self.kept or step >= self.kept[-1][0] + self.apart:
            self.kept.append(self.newest)
        if len(self.kept) > _POINTS:
            self.kept = self.kept[::2]
            self.apart = int(self.kept[-1][0] - self.kept[0][0]) // len(self.kept)


class Curves:
    """Pairs of step and value, by the number's name, of one round."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._curves: dict[str, _Curve] = {}
        self._step = self._ended = 0  # newest; what a counter came to before it began again

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take in what has changed. A step that falls, as with each epoch, is counted on."""
        if step < self._step:
            self._ended += self._step + (step == 0)
        self._step = step
        step += self._ended
        for name, value in values.items() - self._seen.items():
            if math.isfinite(value) and (name in self._curves or len(self._curves) < _NAMES):
                self._curves.setdefault(name, _Curve()).add(step, value)
        self._seen |= values

    def read(self) -> dict[str, list[list[float]]]:
        """Return copies of the points, the newest ones included."""
        return {
            name: [*one.kept, *([one.newest] if one.newest is not one.kept[-1] else [])]
            for name, one in sorted(self._curves.items())
        }
