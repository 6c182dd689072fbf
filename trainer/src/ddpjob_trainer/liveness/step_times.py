"""Add up the seconds of a rank's steps, and find the rank that holds up the others.

Progress and the adapters' Record call StepAccount as activities and steps end; its sums go into the
rank's record, and from there into the launcher's Account. StepExchange exchanges what Stragglers
reports. Never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from ddpjob_contract import Straggler
from ddpjob_trainer.liveness.heartbeat import ACTIVITIES, Activity, StepSeconds

# --- Seconds by what they went to -----------------------------------------------------------------

#: A backward waits for the other ranks' gradients, an agreement for their numbers.
_WORK: Final[tuple[Activity, ...]] = ("data", "forward", "update", "body", "evaluation")


class StepAccount:
    """``reached``: the last step that was finished before this process: up to it all is repeated.

    A step's seconds run from the end of the one before; the first belongs to the start.
    """

    def __init__(self, reached: int = 0) -> None:
        self._reached = reached
        self._of_step = dict.fromkeys(ACTIVITIES, 0.0)
        self._of_device: dict[Activity, float] = {}
        self.sums = StepSeconds()
        self.newest = (0.0, 0.0)  # of the last ended step: without waiting for others, for data

    def passed(self, activity: Activity, seconds: float) -> None:
        """Add seconds of the step under way."""
        self._of_step[activity] += seconds

    def measured(self, activity: Activity, total: float) -> None:
        """Replace the host's seconds by a device's, of which the sum so far is known."""
        self._of_step[activity] = total - self._of_device.get(activity, 0.0)
        self._of_device[activity] = total

    def stepped(self, step: int, seconds: float, now: float) -> StepSeconds:
        """Return the sums with a step that has ended. ``now``: monotonic."""
        spent, sums = self._of_step, self.sums
        self._of_step = dict.fromkeys(ACTIVITIES, 0.0)
        self.newest = (sum(spent[one] for one in _WORK), spent["data"])
        if not sums.last:
            self.sums = sums._replace(last=now)
            return self.sums
        new = step > self._reached
        self.sums = StepSeconds(
            sums.trained + seconds,
            sums.repeated + (not new) * seconds,
            sums.data + new * spent["data"],
            sums.snapshot + new * spent["snapshot"],
            now,
        )
        return self.sums


# --- Stragglers -----------------------------------------------------------------------------------

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

    def receive(self, sums: Sequence[float]) -> Straggler | None:
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
