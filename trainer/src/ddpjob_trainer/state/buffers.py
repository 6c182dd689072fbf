"""The buffers of a model: which ones the ranks share, and how they are put back.

Those of the state_dict count always. One that is not persistent counts while it has the shape that
it had at prepare(); else it is a cache, as long as what a rank has seen, and each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer is: forward may put another tensor there."""

    name: str
    module: torch.nn.Module
    key: str

    def get(self) -> torch.Tensor | None:
        """Return what is there now."""
        return self.module._buffers[self.key]

    def put(self, buffer: torch.Tensor | None) -> None:
        """Put a tensor there."""
        self.module._buffers[self.key] = buffer


def places(module: torch.nn.Module, *, persistent: bool = True) -> list[Place]:
    """Return every buffer's place, once: of the persistent ones, or of the others."""
    return [
        Place(f"{prefix}.{key}" if prefix else key, part, key)
        for prefix, part in module.named_modules()
        for key in part._buffers
        if persistent is not (key in part._non_persistent_buffers_set)
    ]


def persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers under their names, those that are there."""
    for place in places(module):
        buffer = place.get()
        if buffer is not None:
            yield place.name, buffer


class Steady:
    """The buffers outside of a model's state_dict, as tensors on which all ranks agree.

    Where one has another shape by now, the tensor that was there first stands for it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        known = {id(buffer) for _, buffer in persistent(module)}
        self._first = {
            place: buffer
            for place in places(module, persistent=False)
            if (buffer := _strided(place.get())) is not None and id(buffer) not in known
        }

    def tensors(self) -> list[torch.Tensor]:
        """Return those of now, in the same order on every rank."""
        return [
            now if (now := place.get()) is not None and _is_alike(now, first) else first
            for place, first in self._first.items()
        ]


class Backup:
    """What the buffers held before a step's first forward.

    All are copied, as BatchNorm's kernel changes its statistics without telling anybody: a
    tensor's version stays what it was. DDP sends as much over the network in each step.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = places(module)
        self._others = places(module, persistent=False)
        self._step = -1
        self._buffers: list[torch.Tensor | None] = []
        self._copies: list[torch.Tensor] = []

    def take(self, step: int) -> None:
        """Remember what they hold now, once per step."""
        if step == self._step:
            return
        self._step = step
        buffers = [place.get() for place in self._places]
        buffers += [_strided(place.get()) for place in self._others]
        if list(map(id, buffers)) != list(map(id, self._buffers)):  # == would compare elements
            self._buffers = buffers
            self._copies = [torch.empty_like(buffer) for buffer in _there(buffers)]
        if self._copies:
            torch._foreach_copy_(self._copies, _there(buffers))

    def put_back(self) -> None:
        """Undo all changes since, but of caches that have another shape by now."""
        count = len(self._places)
        for place, buffer in zip(self._places, self._buffers[:count], strict=True):
            place.put(buffer)
        for place, buffer in zip(self._others, self._buffers[count:], strict=True):
            now = place.get()
            if buffer is not None and now is not None and _is_alike(now, buffer):
                place.put(buffer)
        if self._copies:
            # .data: a graph that waits for its backward checks the version of what it has saved.
            torch._foreach_copy_([buffer.data for buffer in _there(self._buffers)], self._copies)


@contextmanager
def preserved(module: torch.nn.Module, wanted: bool = True) -> Iterator[None]:
    """Leave the buffers as they were found, for evaluation; if not ``wanted``, as they become."""
    if not wanted:
        yield
        return
    backup = Backup(module)
    with torch.no_grad():
        backup.take(0)
    try:
        yield
    finally:
        with torch.no_grad():
            backup.put_back()


def _there(buffers: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _strided(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Leave sparse ones out, which cannot be sent or copied into."""
    return buffer if buffer is not None and buffer.layout is torch.strided else None


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
