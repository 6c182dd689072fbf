"""Assign each rank its bytes of a snapshot and their places; draft the manifest.

The writer calls this on every rank at the same step, with what training_state has captured. All
ranks hold equal parameters and optimizer state, so each writes another part of them; what only one
rank has (its random numbers; rank 0's buffers and counters) that rank writes itself. Shapes alone
decide: ranks with equal fingerprints come to equal results.
"""

from __future__ import annotations

import json
import math
import mmap
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch

from ddpjob_trainer.gpu.accelerator import Accelerator, in_order
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.ondisk import disk, files
from ddpjob_trainer.snapshot.ondisk.files import Piece, data_name
from ddpjob_trainer.snapshot.ondisk.manifest import ITEM_BYTES, Chunk, DataFile, Manifest
from ddpjob_trainer.snapshot.save.parts import Report
from ddpjob_trainer.state.codec import DTYPES, Flat

# --- Staging --------------------------------------------------------------------------------------
# A buffer holds the data file as it will be written. What user code may change after the step
# (buffers, counters, registered objects) is copied at once; parameters and optimizer state do not
# change before the next update, so their copy may run beside the next forward and backward.

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


_warned_unpinned = False


def _pin(memory: torch.Tensor, accelerator: Accelerator) -> bool:
    """Page-lock memory: a GPU's copies run beside its kernels only into memory it knows."""
    global _warned_unpinned
    try:
        return accelerator.pin(memory)
    except RuntimeError as error:
        if not _warned_unpinned:
            _warned_unpinned = True
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


# --- Layout ---------------------------------------------------------------------------------------

#: Pieces are no larger, so that no reader needs much memory at once.
MAX_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """``count`` elements of a flattened tensor from ``start`` on."""

    tensor: str
    start: int
    count: int


Shape = tuple[str, tuple[int, ...]]  # dtype, dimensions
#: From snapshot to snapshot a structure rarely changes: for 2304 tensors 5 ms a snapshot, not 12.
_remembered = lru_cache(1)


@dataclass(frozen=True, slots=True)
class Structure:
    """A state without its contents: it decides who writes what, and where in a file."""

    shapes: tuple[tuple[str, Shape], ...]  # their order counts
    shared: frozenset[str]
    own: tuple[tuple[str, Shape], ...]


@dataclass(frozen=True)
class Captured:
    """The whole state at one step; tensors are the live ones.

    ``shared``: names of those tensors that all ranks hold in equal bits. ``own``: what only this
    rank has. Rank 0's count for all others.
    """

    flat: Flat
    shared: frozenset[str]
    own: Mapping[str, torch.Tensor]

    @cached_property
    def structure(self) -> Structure:
        """Return what it consists of."""
        return Structure(_shapes(self.flat.tensors), self.shared, _shapes(self.own))

    def check(self) -> None:
        """Raise ValueError for more names and numbers than a manifest can hold."""
        disk.dump_json([self.flat.tree, self.flat.aliases, dict(self.structure.shapes)])


def _shapes(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, Shape], ...]:
    return tuple((name, (DTYPES[t.dtype], tuple(t.shape))) for name, t in tensors.items())


@_remembered
def fingerprint(structure: Structure) -> int:
    """Return 24 bits for all that must be equal on ranks that divide the work."""
    facts = [[n, *shape] for n, shape in structure.shapes if n in structure.shared]
    return zlib.crc32(json.dumps(facts).encode()) >> 8


@_remembered
def divide(structure: Structure, writers: int) -> tuple[tuple[Span, ...], ...]:
    """Divide the shared tensors: every element comes in exactly one span of one writer.

    The writers' totals differ by less than two elements.
    """
    sizes = [(n, ITEM_BYTES[d], math.prod(dims)) for n, (d, dims) in structure.shapes]
    sizes = [one for one in sizes if one[0] in structure.shared]
    share = -(-sum(item * count for _, item, count in sizes) // writers)
    shares: list[list[Span]] = [[] for _ in range(writers)]
    writer = position = 0
    for name, item, count in sizes:
        start = 0
        while start < count:
            while position >= (writer + 1) * share:
                writer += 1
            room = min((writer + 1) * share - position, MAX_PIECE_BYTES)
            length = min(count - start, max(1, room // item))
            shares[writer].append(Span(name, start, length))
            start += length
            position += length * item
    return tuple(map(tuple, shares))


@dataclass(frozen=True, slots=True)
class Layout:
    """A writer's data file before it is filled.

    ``spans``: (where in the file, what, whether user code cannot change it before the next update).
    """

    header: bytes
    spans: tuple[tuple[int, Span, bool], ...]
    bytes: int

    def copies(self, captured: Captured) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Return what must be copied before training goes on, and what may be copied later."""
        tensors = {**captured.flat.tensors, **captured.own}
        now: list[Copy] = []
        later: list[Copy] = []
        flat: dict[str, torch.Tensor] = {}  # a copy of what is not, once for all its spans
        for offset, span, late in self.spans:
            if span.tensor not in flat:
                flat[span.tensor] = in_order(tensors[span.tensor])
            content = flat[span.tensor][span.start : span.start + span.count]
            (later if late else now).append((offset, content))
        return tuple(now), tuple(later)


@_remembered
def lay_out(structure: Structure, writers: int, writer: int) -> Layout:
    """Lay out the data file of a writer, writer 0 being rank 0.

    Raises ValueError when its header is too large to be read again.
    """
    shapes = dict((*structure.shapes, *structure.own))
    sole = [name for name, _ in structure.own]
    sole += [n for n, _ in structure.shapes if writer == 0 and n not in structure.shared]
    spans = [(span, False) for name in sole for span in _whole(name, shapes[name])]
    spans += [(span, True) for span in divide(structure, writers)[writer]]
    known = {key_of(span): (span, late) for span, late in spans}
    pieces = [Piece(key, shapes[span.tensor][0], span.count) for key, (span, _) in known.items()]
    pieces = files.order_pieces(pieces)
    header = files.data_header(pieces)
    ends = [*accumulate((piece.bytes for piece in pieces), initial=len(header))]
    placed = ((start, *known[piece.key]) for start, piece in zip(ends, pieces, strict=False))
    return Layout(header, tuple(placed), ends[-1])


def _whole(name: str, shape: Shape) -> list[Span]:
    """Cut one tensor into spans of bounded size. An empty one has none."""
    dtype, dimensions = shape
    most, count = MAX_PIECE_BYTES // ITEM_BYTES[dtype], math.prod(dimensions)
    return [Span(name, start, min(most, count - start)) for start in range(0, count, most)]


def key_of(span: Span) -> str:
    """Name a span in its data file."""
    return f"{span.tensor}@{span.start}"


# --- The manifest -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draft:
    """What rank 0 needs for a manifest beside the reports of all writers. Holds no tensor."""

    step: int
    config: Mapping[str, Any]
    structure: Structure
    nonce: str
    tree: Any
    aliases: Mapping[str, str]

    def manifest(self, reports: Sequence[Report]) -> Manifest:
        """Put the parts together. Raises ValueError where they do not belong together."""
        structure, shapes = self.structure, dict(self.structure.shapes)
        odd = next((r.rank for r in reports if r.fingerprint != fingerprint(structure)), None)
        if odd is not None:
            raise ValueError(
                f"rank {odd} holds parameters or optimizer state of other names or shapes than rank"
                " 0, so their parts do not belong together: register(..., per_rank=True) what only"
                " one rank has"
            )
        tensors, parts, chunks = dict(shapes), [], []
        for report, shared in zip(reports, divide(structure, len(reports)), strict=True):
            name = data_name(self.step, self.nonce, report.rank)
            parts.append(DataFile(name, report.bytes, report.crc32))
            sole = (
                []
                if report.rank
                else [(n, shape) for n, shape in shapes.items() if n not in structure.shared]
            )
            for own, dtype, dimensions in report.own:
                tensors[own] = (dtype, dimensions)
                sole.append((own, (dtype, dimensions)))
            spans = [span for alone, shape in sole for span in _whole(alone, shape)]
            chunks += [
                Chunk(s.tensor, s.start, s.count, name, key_of(s)) for s in (*spans, *shared)
            ]
        return Manifest(
            self.step, self.config, tuple(parts), tensors, tuple(chunks), self.aliases, self.tree
        )
