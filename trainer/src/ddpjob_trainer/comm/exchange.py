"""What the ranks tell one another besides gradients: losses, whether to stop, facts of snapshots.

One exchange per step. It starts before the optimizer's update and is waited for after the loop's
body, so the network's latency hides behind both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ddpjob_trainer.comm.world import World, peer_loss


class Exchange:
    """Adds up numbers over all ranks, in the background. Every rank makes the same calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._counts: dict[str, int] = {}
        self._tensor = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, numbers: Mapping[str, Sequence[float]]) -> None:
        """Send numbers under names; names and counts are the same on every rank."""
        self._counts = {name: len(values) for name, values in numbers.items()}
        flat = [value for values in numbers.values() for value in values]
        self._tensor = torch.tensor(flat, dtype=torch.float64)
        group = self._world.control
        if self._world.size > 1 and group is not None:
            with peer_loss():
                # Not dist.all_reduce(), whose checks take longer than the rest of this.
                self._work = group.allreduce([self._tensor])

    def wait(self) -> dict[str, list[float]]:
        """Return the sums over all ranks, a second time too. Raises PeerLostError."""
        if self._work is not None:
            with peer_loss():
                self._work.wait()
            self._work = None
        values: list[float] = self._tensor.tolist()
        sums, start = {}, 0
        for name, count in self._counts.items():
            sums[name] = values[start : start + count]
            start += count
        return sums
