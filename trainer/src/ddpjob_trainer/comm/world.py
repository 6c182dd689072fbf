"""Hold a rank's place in the world: small exchanges between ranks, and leaving the group.

rendezvous.join() makes the World; the rest of the package talks through it.
"""

from __future__ import annotations

import json
import socket
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Loaded after the group began, its default arguments would hold the group, see leave_group().
import torch.distributed.nn

from ddpjob_trainer.comm.peer_loss import peer_loss
from ddpjob_trainer.comm.sealed import Board
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.gpu.accelerator import Accelerator, Number, in_order

# --- The world ------------------------------------------------------------------------------------

#: Attributes of DistributedDataParallel whose C++ parts hold the group as well.
OF_DDP = ("reducer", "logger", "process_group")
#: Objects that hold the process group, global as it is: see leave_group().
_holders: list[tuple[object, tuple[str, ...]]] = []


@dataclass(slots=True)  # not frozen: leave_group() clears control
class World:
    """A rank's place in the job, and the groups it talks through."""

    rank: int
    size: int
    device: torch.device
    identity: Identity
    control: dist.ProcessGroup | None  # gloo, for CPU tensors, also where gradients go through NCCL
    board: Board | None  # in the store, for exchanges that must not wait for all ranks
    links: Links | None = None  # where one launcher has all ranks
    accelerator: Accelerator = field(init=False)

    def __post_init__(self) -> None:
        self.accelerator = accelerator.of(self.device)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up a few numbers over all ranks, always in the same order."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with peer_loss():
                dist.all_reduce(tensor, group=self.control)
        result: list[float] = tensor.tolist()
        return result

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast the bytes of rank 0 to every rank."""
        if self.size == 1:
            return data or b""
        length = torch.tensor([len(data or b"")])
        with peer_loss():
            dist.broadcast(length, 0, group=self.control)
            buffer = torch.zeros(int(length), dtype=torch.uint8)
            if data:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if len(buffer):
                dist.broadcast(buffer, 0, group=self.control)
        return buffer.numpy().tobytes()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor with that of rank ``source``, in place."""
        if self.size > 1 and tensor.numel():
            flat = in_order(tensor).cpu().view(torch.uint8)
            with peer_loss():
                dist.broadcast(flat, source, group=self.control)
            shared = flat.device == tensor.device and flat.data_ptr() == tensor.data_ptr()
            if self.rank != source and not shared:  # else it was received in place
                tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))

    def gather_bytes(self, what: str, data: bytes) -> list[bytes]:
        """Gather each rank's bytes on every rank.

        ``what``: the call; ConfigError if calls differ.
        """
        if self.size == 1:
            return [data]
        mark = what.encode() + b"\0"
        found = self._gather(mark + data)
        for rank, other in enumerate(found):
            if not other.startswith(mark):
                there = other.partition(b"\0")[0].decode(errors="replace")
                raise other_call((rank, there), (self.rank, what))
        return [one[len(mark) :] for one in found]

    def _gather(self, data: bytes) -> list[bytes]:
        with peer_loss():
            length = torch.tensor([len(data)])
            lengths = [torch.zeros_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length, group=self.control)
            longest = max(int(n) for n in lengths)
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.zeros_like(mine) for _ in range(self.size)]
            dist.all_gather(parts, mine, group=self.control)
        return [p[: int(n)].numpy().tobytes() for p, n in zip(parts, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.control is not None and self.size > 1:
            with peer_loss():
                # gloo takes it for no part of another collective, in which the others may stand.
                self.control.barrier().wait()


def other_call(first: tuple[int, str], second: tuple[int, str]) -> ConfigError:
    """Build the error for two ranks that wait for each other in different calls."""
    return ConfigError(
        f"rank {first[0]} is in {first[1]} and rank {second[0]} in {second[1]}, so they would wait"
        " for each other: every rank makes these calls, in the same order; none of them may stand"
        " below an `if` that is true on one rank only, such as run.is_main. step.stop() ends the"
        " loop on all ranks; a `break` on one does not, nor an error that one rank's script catches"
    )


def agree(world: World, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
    """Raise ConfigError on every rank unless each fact is equal on all of them.

    Otherwise the ranks would train on other data, or wait in different collectives. ``own``:
    values that may differ; the result has each rank's.
    """
    blob = json.dumps([facts, own]).encode()
    gathered = [json.loads(blob) for blob in world.gather_bytes("the start of run.steps()", blob)]
    for rank, (theirs, _) in enumerate(gathered):
        for name, value in gathered[0][0].items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name} is {theirs.get(name)} on rank {rank} and {value} on rank 0: every"
                    " rank must be given the same"
                )
    return [one for _, one in gathered]


def holds_group(holder: object, *attributes: str) -> None:
    """Have these attributes of an object set to None when this process leaves the group."""
    _holders.append((holder, attributes))


def leave_group(*, together: bool) -> None:
    """Leave and free the group, and so wait for its threads. Safe to repeat.

    gloo's threads may drop a collective's last tensor long after it. One that does so while Python
    finalizes cannot take the GIL and aborts the process: exit code 134, with all the work done. The
    threads are joined when the group is freed, which needs all its holders to let go.

    ``together``: all ranks leave now. NCCL waits for queued work, on this rank and on its machine's
    others, and for ever if one of them does not take part; a rank that leaves alone aborts that
    work.
    """
    if not together and dist.is_initialized() and dist.get_backend() == "nccl":
        world: Any = dist.group.WORLD
        world.abort()
    while _holders:
        holder, attributes = _holders.pop()
        for name in attributes:
            setattr(holder, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- A step's exchange ----------------------------------------------------------------------------
# One exchange per step. It starts before the optimizer's update and ends after the loop's body,
# so the network's latency hides behind both. Where a GPU queues its work, its numbers travel
# apart from the hosts', through the gradients' backend, and no host waits for them.

Numbers = Mapping[str, Sequence[Number]]


class Links:
    """A socket to each other rank, where one launcher has them all. Calls raise OSError.

    A collective of gloo wakes two threads of each rank, several times: where ranks share cores that
    takes longer than all else in an exchange. A socket wakes only who waits already.
    """

    def __init__(self, others: Sequence[socket.socket]) -> None:
        self._others = others

    def send(self, values: Sequence[float]) -> None:
        """Send numbers to all, without a wait."""
        data = array("d", values).tobytes()
        for other in self._others:
            other.send(data)

    def sums(self, own: Sequence[float]) -> list[float]:
        """Wait for as many numbers of each; return the sums with ``own``."""
        parts = [own]
        for other in self._others:
            # A byte more than is due: the socket cuts a longer message off, in silence.
            parts.append(array("d", other.recv(8 * len(own) + 1)))
            if not parts[-1]:
                raise ConnectionError("Connection closed by peer")
        return [sum(values) for values in zip(*parts, strict=True)]


class Message:
    """Numbers under names, being added up."""

    def __init__(self, numbers: Numbers, receive: Callable[[], Sequence[float]]) -> None:
        self._counts = {name: len(values) for name, values in numbers.items()}
        self._receive = receive

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """Wait for the sums over all ranks. Raises PeerLostError."""
        with peer_loss():
            values = iter(self._receive())
        del self._receive  # a collective's work holds the group, see leave_group()
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
    values: Any = list(chain(*numbers.values()))  # floats: no device computes them
    if world.size == 1 or world.control is None:
        return Message(numbers, lambda: values)
    with peer_loss():
        if world.links is not None:
            world.links.send(values)
            return Message(numbers, partial(world.links.sums, values))
        tensor = torch.tensor(values, dtype=torch.float64)
        # Not dist.all_reduce(), whose checks take longer than the rest of this function.
        work = world.control.allreduce([tensor])
    return Message(numbers, lambda: (work.wait(), tensor.tolist())[1])


def _queue(world: World, numbers: Numbers) -> Message:
    vector, work = world.accelerator.numbers(list(chain(*numbers.values()))), None
    if world.size > 1:
        with peer_loss():
            work = dist.all_reduce(vector, async_op=True)
    return Message(numbers, world.accelerator.read(vector, work).values)
