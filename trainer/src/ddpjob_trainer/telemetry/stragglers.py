"""Find the rank that holds up the others, from the time that each has worked.

StepExchange sends report() with each step's numbers, and on rank 0 hands the sums to learn(): it
knows what all have worked, without a message more. Who waits for others works less than a step
takes; so the one that does not wait is the slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from ddpjob_contract import Straggler

#: More ranks than this report nothing: what they exchange grows with their number.
MOST_RANKS: Final = 256
#: The slow one is named when it works so much longer than the others, as a share of the step, ...
BOUND: Final = 0.2
#: ... in so many windows one after another.
WINDOW_SECONDS: Final = 60.0
_WINDOWS: Final = 2


class Stragglers:
    """``spent()``: this rank's seconds of work and of waiting for data in the last ended step."""

    def __init__(
        self,
        rank: int,
        size: int,
        spent: Callable[[], tuple[float, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._size = rank, size if 1 < size <= MOST_RANKS else 0
        self._spent, self._clock = spent, clock
        self._began = clock()
        self._sums = [0.0] * (2 * self._size)
        self._suspects: list[int] = []  # of the windows before, one after another
        self.found: Straggler = {}

    def report(self) -> list[float]:
        """Return this rank's numbers, in their places among zeros."""
        numbers = [0.0] * (2 * self._size)
        if self._size:
            numbers[2 * self._rank : 2 * self._rank + 2] = self._spent()
        return numbers

    def learn(self, sums: Sequence[float]) -> Straggler | None:
        """Add up a step; return the slow rank, {} for none, when that changes."""
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
        took = self._clock() - self._began
        if not self._size or took < WINDOW_SECONDS:
            return None
        now = _slowest(self._sums, took)
        self._began, self._sums = self._clock(), [0.0] * (2 * self._size)
        rank = now.get("rank", -1)
        self._suspects = [*self._suspects, rank][-_WINDOWS:]
        before = self.found.get("rank", -1)
        if rank == before or self._suspects != [rank] * _WINDOWS:
            return None
        self.found = now
        return now


def _slowest(sums: Sequence[float], took: float) -> Straggler:
    """Compare the ranks' work in a window of ``took`` seconds."""
    work, data = sums[::2], sums[1::2]
    rank = max(range(len(work)), key=work.__getitem__)
    rest = [n for n in range(len(work)) if n != rank]
    longer = (work[rank] - median(work[n] for n in rest)) / took
    if longer <= BOUND:
        return {}
    fetching = (data[rank] - median(data[n] for n in rest)) / took
    share = round(min(1.0, longer), 3)
    return {"rank": rank, "share": share, "by": "data" if fetching > longer / 2 else "compute"}
