"""What the ranks tell one another besides gradients: losses, whether to stop, facts of snapshots.

A collective costs as much for a few numbers as for many, so short steps share one: each adds its
numbers, and now and then all are sent. Long steps send each. It starts before the optimizer's
update and is waited for after the loop's body, so the network's latency hides behind both; behind
the whole next step where several share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpjob_trainer.comm.world import World, peer_loss

#: The steps that share an exchange shall take no longer together, as a signal waits for them and
#: for the step after: longer only when steps have just become longer.
PATIENCE_SECONDS = 0.5
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Sums:
    """Over all ranks: of the numbers sent once, and of those of each step, oldest first."""

    head: list[float]
    rows: list[list[float]]


class Exchange:
    """Adds up numbers over all ranks, in the background. Every rank makes the same calls."""

    def __init__(self, world: World, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._clock = clock
        self._since = clock()  # when the last exchange began
        self._share = 1  # so many steps share one
        self._rows: list[Sequence[float]] = []  # of steps that are not sent yet
        self._sent = 0  # how many rows are under way
        self._head = 0  # how many numbers are sent once
        self._tensor = torch.empty(0)
        self._work: dist.Work | None = None
        self.under_way = False

    def add(self, row: Sequence[float]) -> None:
        """Take in a step's numbers: equally many on every rank and at every step."""
        self._rows.append(row)

    @property
    def due(self) -> bool:
        """Whether the steps taken in shall wait no longer: the same on every rank."""
        return len(self._rows) >= self._share

    @property
    def newer(self) -> bool:
        """Whether something was taken in that is not sent yet."""
        return bool(self._rows)

    @property
    def ripe(self) -> bool:
        """At the end of a step, whether to finish() now: the same on every rank.

        Steps share one because they are short; it is done by itself while the next one runs.
        """
        return self.under_way and (self._sent == 1 or self.newer)

    def start(self, head: Sequence[float]) -> None:
        """Send what was taken in, and ``head``: equally many numbers on every rank."""
        values = [self._proposal() if self._world.rank == 0 else 0.0, *head]
        self._head, self._sent, self._since = len(values), len(self._rows), self._clock()
        for row in self._rows:
            values += row
        self._rows.clear()
        self._tensor = torch.tensor(values, dtype=torch.float64)
        self.under_way = True
        group = self._world.control
        if self._world.size > 1 and group is not None:
            with peer_loss():
                # Not dist.all_reduce(), whose checks take longer than the rest of this.
                self._work = group.allreduce([self._tensor])

    def wait(self) -> Sums:
        """Return the sums; a second time too, until finish(). Raises PeerLostError."""
        if self._work is not None:
            with peer_loss():
                self._work.wait()
            self._work = None
        values: list[float] = self._tensor.tolist()
        rest, rows = values[self._head :], self._sent
        width = len(rest) // max(rows, 1)
        return Sums(
            values[1 : self._head], [rest[i * width : (i + 1) * width] for i in range(rows)]
        )

    def finish(self) -> Sums:
        """Wait; another may start() then."""
        sums = self.wait()
        self._share = int(self._tensor[0])
        self.under_way = False
        return sums

    def _proposal(self) -> int:
        """How many steps the next exchange is for, by rank 0's clock.

        It doubles as long as there was time enough for twice as many, and falls back to one. So
        what comes every few steps, an evaluation say, holds up an exchange at most once.
        """
        seconds = self._clock() - self._since
        if seconds > PATIENCE_SECONDS:
            return 1
        if len(self._rows) >= self._share and seconds * 2 <= PATIENCE_SECONDS:
            return min(self._share * 2, MOST_STEPS)
        return self._share
