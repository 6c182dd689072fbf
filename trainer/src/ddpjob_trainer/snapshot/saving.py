"""Begin a snapshot: decide which part is this rank's, lay it out, stage it.

Called by the training thread of every rank at the same step; the rest is the Tracker's.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.snapshot import layout, partition, sealed
from ddpjob_trainer.snapshot.board import Report
from ddpjob_trainer.snapshot.format import DTYPES, Flat
from ddpjob_trainer.snapshot.layout import Piece
from ddpjob_trainer.snapshot.manifest import Chunk, DataFile, Manifest
from ddpjob_trainer.snapshot.partition import Span
from ddpjob_trainer.snapshot.staging import Copy
from ddpjob_trainer.snapshot.tracking import Assemble, Place
from ddpjob_trainer.snapshot.writing import data_name

Shape = tuple[str, tuple[int, ...]]  # dtype, dimensions


@dataclass(frozen=True, slots=True)
class Captured:
    """The whole state at one step; tensors are the live ones.

    ``shared``: names of those tensors that all ranks hold in equal bits. ``own``: what only this
    rank has. Rank 0's count for all others.
    """

    flat: Flat
    shared: frozenset[str]
    own: Mapping[str, torch.Tensor]

    def shapes(self) -> dict[str, Shape]:
        """Of every tensor of the flat state."""
        return {n: (DTYPES[t.dtype], tuple(t.shape)) for n, t in self.flat.tensors.items()}

    def check(self) -> None:
        """Raise ValueError for more names and numbers than a manifest can hold."""
        sealed.dumps([self.flat.tree, self.flat.aliases, self.shapes()])

    def main_bytes(self) -> int:
        """What only rank 0's value counts of, so that rank 0 must write it."""
        return sum(t.nbytes for n, t in self.flat.tensors.items() if n not in self.shared)

    def fingerprint(self) -> int:
        """24 bits that stand for what must be equal on all ranks before they divide the work."""
        shapes = self.shapes()
        facts = [[name, *shapes[name]] for name in shapes if name in self.shared]
        return zlib.crc32(json.dumps(facts).encode()) >> 8


@dataclass(frozen=True, slots=True)
class Shares:
    """Which spans of the shared tensors each writer writes."""

    spans: tuple[tuple[Span, ...], ...]
    main: frozenset[str]  # tensors that rank 0 writes whole

    @classmethod
    def plan(cls, captured: Captured, writers: int, main_bytes: int, *, divided: bool) -> Shares:
        """Every rank comes to the same result. Not ``divided``: rank 0 writes everything."""
        shapes = captured.shapes()
        shared = captured.shared if divided else frozenset()
        sizes = {
            name: (dtype, math.prod(shape))
            for name, (dtype, shape) in shapes.items()
            if name in shared
        }
        spans = partition.divide(sizes, [main_bytes, *[0] * (writers - 1)])
        return cls(tuple(map(tuple, spans)), frozenset(shapes.keys() - shared))


@dataclass(frozen=True, slots=True)
class Image:
    """A data file before it is filled: its header, and what comes where."""

    header: bytes
    now: tuple[Copy, ...]  # what user code may change as soon as training goes on
    later: tuple[Copy, ...]
    bytes: int


def measure(captured: Captured, shares: Shares, writer: int) -> int:
    """Return how many bytes a writer's data file has. Raises ValueError when it has too many."""
    pieces = layout.order([part.piece for part in _parts(captured, shares, writer)])
    return len(layout.header(pieces)) + sum(piece.bytes for piece in pieces)


def lay_out(captured: Captured, shares: Shares, writer: int) -> Image:
    """Return the data file of a writer, writer 0 being rank 0.

    Raises ValueError when its header is too large to be read again.
    """
    parts = {part.piece.key: part for part in _parts(captured, shares, writer)}
    pieces = layout.order([part.piece for part in parts.values()])
    header = layout.header(pieces)
    offset = len(header)
    now: list[Copy] = []
    later: list[Copy] = []
    in_order: dict[str, torch.Tensor] = {}  # a copy of what is not, once for all its spans
    for piece in pieces:
        part = parts[piece.key]
        span, name = part.span, part.span.tensor
        if name not in in_order:
            in_order[name] = part.tensor.detach().contiguous().view(-1)
        content = in_order[name][span.start : span.start + span.count]
        (later if part.late else now).append((offset, content))
        offset += piece.bytes
    return Image(header, tuple(now), tuple(later), offset)


@dataclass(frozen=True, slots=True)
class _Part:
    """A span of a tensor. ``late``: user code cannot change it as soon as training goes on."""

    piece: Piece
    tensor: torch.Tensor
    span: Span
    late: bool


def _parts(captured: Captured, shares: Shares, writer: int) -> list[_Part]:
    flat = captured.flat.tensors
    sole = dict(captured.own)
    if writer == 0:
        sole.update({n: flat[n] for n in flat if n in shares.main})
    parts = [(span, sole[span.tensor], False) for span in _whole(sole)]
    parts += [(span, flat[span.tensor], True) for span in shares.spans[writer]]
    return [
        _Part(Piece(key_of(span), DTYPES[tensor.dtype], span.count), tensor, span, late)
        for span, tensor, late in parts
    ]


def _whole(tensors: Mapping[str, torch.Tensor]) -> list[Span]:
    return [
        span
        for name, tensor in tensors.items()
        for span in partition.whole(name, DTYPES[tensor.dtype], tensor.numel())
    ]


def key_of(span: Span) -> str:
    """Name of a span in its data file."""
    return f"{span.tensor}@{span.start}"


def assembler(
    step: int, captured: Captured, shares: Shares, config: Mapping[str, Any], place: Place
) -> Assemble:
    """Return what makes the manifest, once every writer has reported. Holds no tensor."""
    shapes = captured.shapes()
    tree, aliases, config = captured.flat.tree, dict(captured.flat.aliases), dict(config)

    def chunks_of(spans: Sequence[Span], file: str) -> list[Chunk]:
        return [Chunk(s.tensor, s.start, s.count, file, key_of(s)) for s in spans]

    def make(reports: Sequence[Report]) -> Manifest:
        tensors, files, chunks = dict(shapes), [], []
        for report, shared in zip(reports, shares.spans, strict=True):
            name = data_name(step, place.nonce, report.rank)
            files.append(DataFile(name, report.bytes, report.crc32))
            sole = [(n, shapes[n]) for n in shapes if n in shares.main and report.rank == 0]
            for own, dtype, shape in report.own:
                tensors[own] = (dtype, shape)
                sole.append((own, (dtype, shape)))
            for alone, (dtype, shape) in sole:
                chunks += chunks_of(partition.whole(alone, dtype, math.prod(shape)), name)
            chunks += chunks_of(shared, name)
        return Manifest(step, config, tuple(files), tensors, tuple(chunks), aliases, tree)

    return make
