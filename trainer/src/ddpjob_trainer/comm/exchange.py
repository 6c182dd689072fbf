"""Exchange a step's numbers besides gradients: losses, whether to stop, facts of snapshots.

One exchange per step. It starts before the optimizer's update and ends after the loop's body, so
the network's latency hides behind both. Where a GPU queues its work, its numbers travel apart from
the hosts', through the gradients' backend, and no host waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpjob_trainer.comm.peer_loss import peer_loss
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.gpu.accelerator import Number, Reading

Numbers = Mapping[str, Sequence[Number]]


class Message:
    """Numbers under names, being added up."""

    def __init__(self, numbers: Numbers, work: dist.Work | None, reading: Reading) -> None:
        self._counts = {name: len(values) for name, values in numbers.items()}
        self._work = work
        self._reading = reading

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """Wait for the sums over all ranks. Raises PeerLostError."""
        if self._work is not None:
            with peer_loss():
                self._work.wait()
            self._work = None
        values = iter(self._reading.values())
        return {name: list(islice(values, count)) for name, count in self._counts.items()}


class Sent(NamedTuple):
    """One step's numbers. A rank may wait for either part alone, and repeatedly."""

    host: Message
    device: Message


def send(world: World, numbers: Numbers, measured: Collection[str] = ()) -> Sent:
    """Send numbers under names, to be added up over all ranks in the background.

    Every rank makes the same calls: names and counts are the same. ``measured``: names of the
    numbers that a device may still be computing.
    """
    if not world.accelerator.queues:
        message = _send(world, numbers)
        return Sent(message, message)
    now = {name: values for name, values in numbers.items() if name not in measured}
    later = {name: values for name, values in numbers.items() if name in measured}
    return Sent(_send(world, now), _queue(world, later))


def _send(world: World, numbers: Numbers) -> Message:
    tensor = torch.tensor(list(chain(*numbers.values())), dtype=torch.float64)
    work = None
    if world.size > 1 and world.control is not None:
        with peer_loss():
            # Not dist.all_reduce(), whose checks take longer than the rest of this function.
            work = world.control.allreduce([tensor])
    return Message(numbers, work, Reading(tensor))


def _queue(world: World, numbers: Numbers) -> Message:
    vector, work = world.accelerator.numbers(list(chain(*numbers.values()))), None
    if world.size > 1:
        with peer_loss():
            work = dist.all_reduce(vector, async_op=True)
    return Message(numbers, None, world.accelerator.read(vector, work))
