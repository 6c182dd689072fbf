"""Compare the ranks now and then by a cheap hash of their shared state.

Loop calls it. DDP never looks: a flipped bit, a rank that took another branch, or a script that
changes gradients on its own makes ranks drift apart, and the run ends in whatever rank 0 happens to
hold. The hash is computed where the parameters are, at nearly the speed of memory, and one small
all_reduce compares it (MIN = MAX).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from ddpjob_trainer.comm.peer_loss import peer_loss
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError, DivergedError
from ddpjob_trainer.gpu.accelerator import in_order
from ddpjob_trainer.state import stateful
from ddpjob_trainer.state.codec import Flat, UnstorableError, flatten
from ddpjob_trainer.state.stateful import Stateful

_Hashes = npt.NDArray[np.int64]
#: 8-byte words mixed at once: half a megabyte, which a CPU's cache holds; a GPU needs more in a
#: kernel. Ranks that compare have devices of one type.
_ROW = 1 << 16
_ROW_OF = {"cuda": 1 << 22}
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd: multiplication is reversible modulo 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_tensors(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one 64-bit hash per tensor, as int64 on the tensors' device.

    A change of one element always changes it. Changes of several cancel with a chance of about
    2**-60, apart from one kind: an even number of flipped top bits, _ROW words from one another.
    """
    hashes = [_hash(tensor) for tensor in tensors]
    if len({tensor.device for tensor in hashes}) > 1:  # a model split over devices
        hashes = [tensor.to(hashes[0].device) for tensor in hashes]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64)


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    words, rest = _words(tensor.detach())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in (words, rest):
        if not part.numel():
            continue
        rows = torch.split(part, _ROW_OF.get(part.device.type, _ROW))
        mixed = rows[0].clone()
        for row in rows[1:]:  # mixed = mixed * multiplier + row, one pass over memory
            mixed_part = mixed[: row.numel()]
            torch.add(row, mixed_part, alpha=_MULTIPLIER, out=mixed_part)
        # Shifted, or two flipped signs would cancel: multiplication keeps the top bit.
        mixed ^= mixed >> 32
        total = total * _MULTIPLIER + (mixed * _weights(mixed.device)[: mixed.numel()]).sum()
    return total


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View a tensor's bytes as int64, and the rest at its end."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = in_order(tensor)
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()  # int64 needs an aligned start
    flat = flat.view(_INTEGERS[size])
    whole = flat.numel() - flat.numel() % (8 // size)
    return flat[:whole].view(torch.int64), flat[whole:].to(torch.int64)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd pseudorandom numbers, equal everywhere."""
    with np.errstate(over="ignore"):
        row = _ROW_OF.get(device.type, _ROW)
        x = np.arange(1, row + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(29))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


def _first_difference(theirs: _Hashes, mine: _Hashes) -> int | None:
    """Return the first index where they differ, or one of them ends, None if equal."""
    both = min(len(theirs), len(mine))
    different = np.flatnonzero(theirs[:both] != mine[:both])
    if len(different):
        return int(different[0])
    return both if len(theirs) != len(mine) else None


class DivergenceCheck:
    """Compares the ranks every ``every`` steps; 0: never.

    ``buffers``: compare them too. Where DDP broadcasts rank 0's before each forward they differ in
    between, and may.
    """

    def __init__(self, world: World, *, every: int, buffers: bool) -> None:
        self._world = world
        self._every = every if world.size > 1 else 0
        self._buffers = buffers
        self._states_compared = False

    def due(self, step: int, *, needed: bool) -> bool:
        """Return whether to compare after this step. ``needed``: a snapshot or the end follows.

        A diverged state must neither become a snapshot nor end silently.
        """
        return self._every > 0 and (needed or step % self._every == 0)

    def check(self, step: int, module: torch.nn.Module, registered: Mapping[str, Stateful]) -> None:
        """Raise DivergedError on every rank when they differ.

        ``module`` holds the models, ``registered`` the state shared by all ranks beside them.
        """
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
        if self._buffers:
            tensors |= stateful.persistent_buffers(module)
        for name, obj in registered.items():
            tensors |= _tensors_of(name, obj, with_buffers=self._buffers)
        if found := self._compare(tensors):
            raise DivergedError(
                f"the ranks no longer hold the same values after step {step}: {found}. No"
                " snapshot was made of it. Look for code that depends on run.rank or changes"
                " parameters or gradients on its own, and for faulty hardware; what each rank has"
                " for itself is kept by run.register(name, obj, per_rank=True)"
            )

    def check_states(
        self, optimizers: Mapping[str, torch.optim.Optimizer], objects: Mapping[str, Stateful]
    ) -> str:
        """Raise ConfigError on every rank when an optimizer's state is each rank's own.

        Once, at the first snapshot, which takes another part from each rank: momentum that only the
        owner of a parameter updates would come back as that of others. No later step shows it.
        Return a warning for numbers and text of ``objects`` that differ: rank 0's are kept, which
        is right for a mean that only rank 0 prints.
        """
        if self._states_compared or not self._every:
            return ""
        self._states_compared = True
        tensors: dict[str, torch.Tensor] = {}
        for name, optimizer in optimizers.items():
            flat = _storable(optimizer)
            tensors[name] = _text(flat)
            tensors |= {f"{name}/{place}": tensor for place, tensor in flat.tensors.items()}
        if found := self._compare(tensors):
            raise ConfigError(
                f"the state of an optimizer is not the same on all ranks: {found}. A snapshot holds"
                " one state for all of them, so a restart would give each rank parts of the others."
                " Let every rank update the state of all parameters"
            )
        plain = {n: o for n, o in objects.items() if not isinstance(o, torch.nn.Module)}
        found = self._compare({name: _text(_storable(obj)) for name, obj in plain.items()})
        return found and (
            f"warning: registered values are not the same on all ranks: {found}. A restart gives"
            " every rank those of rank 0. If they decide anything, register the object with"
            " per_rank=True, or give all ranks the same values (run.sum())"
        )

    def _compare(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return which ranks differ from rank 0 and in what first; nothing: they are equal."""
        hashes = hash_tensors(tensors.values())
        mine = int(_hash(hashes))
        both = torch.tensor([mine, ~mine])  # the least of ~x is the greatest of x
        with peer_loss():
            dist.all_reduce(both, op=dist.ReduceOp.MIN, group=self._world.control)
        least, greatest = int(both[0]), ~int(both[1])
        return "" if least == greatest else self._difference(list(tensors), hashes)

    def _difference(self, names: list[str], hashes: torch.Tensor) -> str:
        mine = hashes.cpu().numpy().tobytes()
        blobs = self._world.gather_bytes("the comparison of ranks", mine)
        every = [np.frombuffer(blob, dtype=np.int64) for blob in blobs]
        found = [(rank, _first_difference(theirs, every[0])) for rank, theirs in enumerate(every)]
        differing = {rank: place for rank, place in found if place is not None}
        others, place = list(differing), min(differing.values())
        first = names[min(place, len(names) - 1)]
        ranks = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {others} differ"
        return f"{ranks} from rank 0, first in {first!r}"


def _tensors_of(name: str, obj: Stateful, *, with_buffers: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a registered object that must be equal on all ranks.

    Not an optimizer's state: a fault in it reaches the parameters a step later (check_states() is
    about another kind). Nor a module's buffers where each rank's model has its own: a teacher's
    BatchNorm has seen this rank's samples only, and an average takes over its model's.
    """
    module = obj.module if isinstance(obj, AveragedModel) else obj
    if not isinstance(module, torch.nn.Module):
        return dict(_walk(name, obj.state_dict()))
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    if with_buffers and module is obj:
        found |= stateful.persistent_buffers(module)
    return {f"{name}.{key}": tensor for key, tensor in found.items()}


def _storable(obj: Stateful) -> Flat:
    try:
        return flatten(obj.state_dict())
    except UnstorableError as error:
        raise ConfigError(f"no snapshot can be made: {error}") from error


def _text(flat: Flat) -> torch.Tensor:
    """Return names, and what is no tensor, as bytes."""
    return torch.frombuffer(bytearray(json.dumps(flat.tree).encode()), dtype=torch.uint8)


def _walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            yield from _walk(f"{name}.{key}", part)
