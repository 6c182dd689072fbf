"""Find the buffers of a model that the ranks share, and put them back.

Those of the state_dict count always. One that is not persistent counts while it has the shape that
it had at prepare(); else it is a cache, as long as what a rank has seen, and each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer is: forward may put another tensor there."""

    name: str
    module: torch.nn.Module
    key: str

    @property
    def is_persistent(self) -> bool:
        """Tell whether the state_dict holds it."""
        return self.key not in self.module._non_persistent_buffers_set

    def get(self) -> torch.Tensor | None:
        """Return what is there now."""
        return self.module._buffers[self.key]


def places(module: torch.nn.Module) -> list[Place]:
    """Return every buffer's place, once."""
    return [
        Place(f"{prefix}.{key}" if prefix else key, part, key)
        for prefix, part in module.named_modules()
        for key in part._buffers
    ]


def persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers under their names, those that are there."""
    for place in places(module):
        buffer = place.get()
        if buffer is not None and place.is_persistent:
            yield place.name, buffer


class Steady:
    """The buffers outside of a model's state_dict, as tensors on which all ranks agree.

    Where one has another shape by now, the tensor that was there first takes its place.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        known = {id(buffer) for _, buffer in persistent(module)}
        self._first = {
            place: buffer
            for place, buffer in _strided({p: p.get() for p in places(module)}).items()
            if not place.is_persistent and id(buffer) not in known
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
        self._step = -1
        self._buffers: dict[Place, torch.Tensor | None] = {}
        self._copies: list[torch.Tensor] = []

    def take(self, step: int) -> None:
        """Remember what they hold now, once per step."""
        if step == self._step:
            return
        before, self._buffers = _strided(self._buffers), {p: p.get() for p in self._places}
        self._step = step
        buffers = list(_strided(self._buffers).values())
        if list(map(id, buffers)) != list(map(id, before.values())):  # == would compare elements
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        if self._copies:
            torch._foreach_copy_(self._copies, buffers)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that is there now with what its place held.

        Raises LookupError where one has come, gone or got another shape since.
        """
        copies = dict(zip(_strided(self._buffers), self._copies, strict=True))
        for place, buffer in self._buffers.items():
            now = place.get()
            if now is None and buffer is None:
                continue
            if now is None or place not in copies or not _is_alike(now, copies[place]):
                raise LookupError(place.name)
            yield now, copies[place]

    def put_back(self) -> None:
        """Undo all changes since, but of caches that have another shape by now."""
        for place, buffer in self._buffers.items():
            now = place.get()
            kept = buffer is not None and now is not None and _is_alike(now, buffer)
            if kept or place.is_persistent:
                place.module._buffers[place.key] = buffer
        if self._copies:
            # .data: a graph that waits for its backward checks the version of what it has saved.
            buffers = [buffer.data for buffer in _strided(self._buffers).values()]
            torch._foreach_copy_(buffers, self._copies)


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


def _strided(found: Mapping[Place, torch.Tensor | None]) -> dict[Place, torch.Tensor]:
    """Return what is there, but sparse ones, which cannot be sent or copied into."""
    return {p: b for p, b in found.items() if b is not None and b.layout is torch.strided}


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
