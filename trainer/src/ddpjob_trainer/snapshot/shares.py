"""Who writes which part of the state: equal bytes for every writer, a pure function of sizes.

All ranks hold equal parameters and optimizer state, so each can write another part of them; what
only one rank has (its random numbers; rank 0's buffers and counters) that rank writes itself and
gets less of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ddpjob_trainer.snapshot.ondisk.manifest import ITEM_BYTES

#: Pieces are no larger, so that no reader needs much memory at once.
MAX_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """``count`` elements of a flattened tensor from ``start`` on."""

    tensor: str
    start: int
    count: int


def whole(name: str, dtype: str, count: int) -> list[Span]:
    """Cut one tensor into spans of bounded size. An empty one has none."""
    most = MAX_PIECE_BYTES // ITEM_BYTES[dtype]
    return [Span(name, start, min(most, count - start)) for start in range(0, count, most)]


def divide(tensors: Mapping[str, tuple[str, int]], taken: Sequence[int]) -> list[list[Span]]:
    """Divide tensors (name -> dtype, elements) among as many writers as ``taken`` has numbers.

    ``taken``: bytes that each writer has to write anyway. Every element comes in exactly one
    span; the writers' totals differ by less than one element where ``taken`` allows it.
    """
    total = sum(count * ITEM_BYTES[dtype] for dtype, count in tensors.values())
    ends = list(accumulate(_quotas(total, taken)))
    shares: list[list[Span]] = [[] for _ in taken]
    writer, position, last = 0, 0, len(taken) - 1
    for name, (dtype, count) in tensors.items():
        item = ITEM_BYTES[dtype]
        start = 0
        while start < count:
            while writer < last and ends[writer] <= position:
                writer += 1
            room = ends[writer] - position if writer < last else MAX_PIECE_BYTES
            length = min(count - start, max(1, min(room, MAX_PIECE_BYTES) // item))
            shares[writer].append(Span(name, start, length))
            start += length
            position += length * item
    return shares


def _quotas(total: int, taken: Sequence[int]) -> list[int]:
    """Fill up the emptiest first, as water would, until all have the same level."""
    level, left = 0, total
    ordered = sorted(taken)
    for filled, (lower, upper) in enumerate(zip(ordered, [*ordered[1:], None], strict=True), 1):
        level = lower
        need = None if upper is None else (upper - lower) * filled
        if need is None or need >= left:
            level = lower + -(-left // filled)
            break
        left -= need
    return [max(0, level - n) for n in taken]
