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

from ddpjob_trainer.snapshot import layout, partition
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


def lay_out(captured: Captured, shares: Shares, writer: int) -> Image:
    """Return the data file of a writer, writer 0 being rank 0."""
    flat = captured.flat.tensors
    own = [(span, captured.own) for span in _whole(captured.own)]
    if writer == 0:
        own += [(s, flat) for s in _whole({n: flat[n] for n in flat if n in shares.main})]
    parts = [(span, tensors, False) for span, tensors in own]
    parts += [(span, flat, True) for span in shares.spans[writer]]
    known = {}
    for span, tensors, late in parts:
        tensor = tensors[span.tensor]
        piece = Piece(key_of(span), DTYPES[tensor.dtype], span.count)
        known[piece.key] = piece, tensor, span, late
    pieces = layout.order([piece for piece, *_ in known.values()])
    header = layout.header(pieces)
    offset = len(header)
    now: list[Copy] = []
    later: list[Copy] = []
    for piece in pieces:
        _, tensor, span, late = known[piece.key]
        content = tensor.detach().contiguous().view(-1)[span.start : span.start + span.count]
        (later if late else now).append((offset, content))
        offset += piece.bytes
    return Image(header, tuple(now), tuple(later), offset)


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
