"""The one small collective of every step: the losses, whether to stop, what is durable.

It starts before the optimizer's update and is waited for after the loop's body, so the network's
latency hides behind both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpjob_trainer.world import World, peer_loss


class Exchange:
    """Adds up a few numbers over all ranks, in the background."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tensor = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, values: Sequence[float]) -> None:
        """Every rank gives equally many numbers."""
        self._tensor = torch.tensor(values, dtype=torch.float64)
        group = self._world.control
        if self._world.size > 1 and group is not None:
            with peer_loss():
                # Not dist.all_reduce(), whose checks take longer than the rest of this.
                self._work = group.allreduce([self._tensor])

    def wait(self) -> list[float]:
        """Return the sums. Raises PeerLostError."""
        if self._work is not None:
            with peer_loss():
                self._work.wait()
            self._work = None
        result: list[float] = self._tensor.tolist()
        return result
