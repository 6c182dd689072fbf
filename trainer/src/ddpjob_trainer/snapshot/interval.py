"""Choose how many steps apart snapshots are where nobody says: everySteps: Auto.

Rank 0 measures and chooses, since ranks must save at the same step: the exchange of each step
(manager.py) carries the step of the next snapshot to all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median, median_low
from typing import Final

#: Of the time, so much may go to the pauses for snapshots.
STALL_SHARE: Final = 0.01
#: The first one comes soon: by it the others are chosen, and until then a failure costs all work.
FIRST_SECONDS: Final = 1.0
#: More often would only keep volumes busy: a restart takes about as long.
LEAST_SECONDS: Final = 5.0
#: Rarer costs more work at a failure than pauses of some seconds cost in between: by Daly's formula
#: ten minutes are best for a pause of 6 s and a failure every 8 hours.
MOST_SECONDS: Final = 600.0
#: Between two there are steps without one, by which a pause is known; and a drill may come there.
LEAST_STEPS: Final = 3
_STEPS, _PAUSES = 50, 5  # the newest so many are looked at


def steps_apart(step: float, pauses: Sequence[float], durable: float) -> int:
    """Return how many steps after a snapshot the next one is due.

    ``step``: seconds of a step. ``pauses``: seconds by which the newest snapshots have held up
    training; none: there is none yet. ``durable``: seconds until the last one was durable, and
    read back.
    """
    seconds = FIRST_SECONDS
    if pauses:
        seconds = min(max(median_low(pauses) / STALL_SHARE, LEAST_SECONDS), MOST_SECONDS)
    return max(LEAST_STEPS, math.ceil(max(seconds, durable) / step))


class Interval:
    """Rank 0's measurements. ``every``: the number chosen from them, 0: there are none yet."""

    def __init__(self) -> None:
        self.every = 0
        self.durable = 0.0  # seconds that the last snapshot took
        self._usual: deque[float] = deque(maxlen=_STEPS)  # seconds of steps
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self._seen = 0
        self._said = 0

    def stepped(self, step: int, seconds: float, saved: int) -> None:
        """Take in the newest step. The one after a snapshot, of step ``saved``, takes longer."""
        if step == self._seen:
            return
        self._seen = step
        if step != saved + 1:
            self._usual.append(seconds)
        elif self._usual:
            self._pauses.append(max(0.0, seconds - median(self._usual)))

    def next(self, saved: int) -> int:
        """Return the step of the next snapshot, 0: no step was measured yet."""
        if not self._usual:
            return 0
        self.every = steps_apart(fmean(self._usual), self._pauses, self.durable)
        return saved + self.every

    def news(self) -> str:
        """Say what was chosen and why, once it was measured and when it has changed by half."""
        if not self._pauses or self._said / 1.5 < self.every < self._said * 1.5:
            return ""
        self._said = self.every
        step, pause = fmean(self._usual), median_low(self._pauses)
        return (
            f"a snapshot every {self.every} steps (everySteps: Auto): each pauses training for"
            f" {pause:.3f} s and is written in {self.durable:.2f} s; a step takes {step:.3f} s"
        )
