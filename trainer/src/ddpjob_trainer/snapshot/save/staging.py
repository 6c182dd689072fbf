"""Stage a rank's part of a snapshot in two reused buffers, until it is durable.

A buffer holds the data file as it will be written. What user code may change after the step
(buffers, counters, registered objects) is copied at once; parameters and optimizer state do not
change before the next update, so their copy may run beside the next forward and backward.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.telemetry.console import say

_PAGE = mmap.PAGESIZE
_SLACK = 16

Copy = tuple[int, torch.Tensor]  # where in the buffer, what


@dataclass(slots=True)
class Buffer:
    """Memory that was touched once. Children share it, so that a fork copies no page of it."""

    size: int
    memory: torch.Tensor  # uint8, the whole of it
    busy: bool = False
    _pinned: bool = False

    @classmethod
    def allocate(cls, size: int, accelerator: Accelerator) -> Buffer:
        """Reserve the memory now, so that no copy ever waits for it. Raises OSError."""
        size = -(-size // _PAGE) * _PAGE
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        memory.zero_()  # maps every page, outside the GIL
        return cls(size, memory, _pinned=_pin(memory, accelerator))

    def release(self, accelerator: Accelerator) -> None:
        """Give the memory back: it is unmapped once nobody has a view of it."""
        if self._pinned:
            accelerator.unpin(self.memory)
        self.memory = torch.empty(0, dtype=torch.uint8)

    def content(self, size: int) -> memoryview:
        """Return its first bytes, for the disk."""
        return memoryview(self.memory.numpy().data)[:size]

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes in."""
        end = offset + len(data)
        self.memory[offset:end].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def copy(self, copies: Sequence[Copy], accelerator: Accelerator, ready: Any) -> None:
        """Copy flat tensors in, as they are at the mark ``ready``, and wait for them.

        All at once: on a GPU one wait for each would be the most of it.
        """
        with accelerator.saving(ready):
            for offset, tensor in copies:
                source = tensor.view(torch.uint8)
                target = self.memory[offset : offset + source.numel()]
                target.copy_(source, non_blocking=accelerator.queues)


_told_unpinned = False


def _pin(memory: torch.Tensor, accelerator: Accelerator) -> bool:
    """Page-lock memory: a GPU's copies run beside its kernels only into memory it knows."""
    global _told_unpinned
    try:
        return accelerator.pin(memory)
    except RuntimeError as error:
        if not _told_unpinned:
            _told_unpinned = True
            text = str(error).strip().partition("\n")[0]
            say(
                0,
                f"warning: memory to stage snapshots in cannot be page-locked ({text}): copies take"
                " longer. Look at the memory and memlock limits of the pod",
            )
        return False


class Pool:
    """Two buffers, so that one can be filled while the other is written. Threads may share it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._lock = threading.Lock()
        self._buffers: list[Buffer | None] = [None, None]

    def prepare(self, size: int) -> None:
        """Allocate what take() will want. Raises OSError."""
        with self._lock:
            for number in range(len(self._buffers)):
                self._fit(number, size)

    def take(self, size: int) -> Buffer | None:
        """Return a buffer of at least ``size`` bytes, None while both are in use.

        It is the caller's until its ``busy`` is set to False. Raises OSError.
        """
        with self._lock:
            for number in range(len(self._buffers)):
                buffer = self._fit(number, size)
                if buffer is not None:
                    buffer.busy = True
                    return buffer
        return None

    def free(self) -> bool:
        """Tell whether take() would find one."""
        return not all(buffer is not None and buffer.busy for buffer in self._buffers)

    def close(self) -> None:
        """Give all memory back. Nobody may use a buffer any more."""
        with self._lock:
            for buffer in self._buffers:
                if buffer is not None:
                    buffer.release(self._accelerator)
            self._buffers = []

    def _fit(self, number: int, size: int) -> Buffer | None:
        buffer = self._buffers[number]
        if buffer is not None and buffer.busy:
            return None
        if buffer is None or buffer.size < size:
            if buffer is not None:
                self._buffers[number] = None
                buffer.release(self._accelerator)
                size += size // _SLACK  # what has grown may grow again
            buffer = self._buffers[number] = Buffer.allocate(size, self._accelerator)
        return buffer
