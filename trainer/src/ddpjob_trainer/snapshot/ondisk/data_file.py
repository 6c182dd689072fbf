"""Lay out a data file: a safetensors header, then flat tensor pieces without gaps.

The header is written so that every piece is aligned to its elements. Reading trusts nothing in
it. Never imports torch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ddpjob_trainer.snapshot.ondisk import checked_json
from ddpjob_trainer.snapshot.ondisk.checked_json import count
from ddpjob_trainer.snapshot.ondisk.manifest import ITEM_BYTES, InvalidSnapshotError

_LENGTH = struct.Struct("<Q")
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` elements stored flat under ``key``."""

    key: str
    dtype: str
    count: int

    @property
    def bytes(self) -> int:
        """Return its size in the file."""
        return self.count * ITEM_BYTES[self.dtype]


def order(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort by element size, widest first: then no piece needs padding."""
    return sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype])


def header(pieces: Sequence[Piece]) -> bytes:
    """Return what comes before the first piece. Raises ValueError when it is too large."""
    entries: dict[str, Any] = {}
    offset = 0
    for piece in pieces:
        end = offset + piece.bytes
        entries[piece.key] = {
            "dtype": piece.dtype,
            "shape": [piece.count],
            "data_offsets": [offset, end],
        }
        offset = end
    text = checked_json.dumps(entries)
    text += b" " * (-len(text) % _ALIGN)
    checked_json.check(text)
    return _LENGTH.pack(len(text)) + text


def read_header(stream: BinaryIO, size: int) -> Mapping[str, tuple[Piece, int]]:
    """Return each piece and its offset in a file of ``size`` bytes.

    Raises OSError, InvalidSnapshotError for everything that safetensors does not allow.
    """
    try:
        (length,) = _LENGTH.unpack(os.pread(stream.fileno(), _LENGTH.size, 0))
        begin = _LENGTH.size + length
        if begin > min(checked_json.MAX_BYTES, size):
            raise ValueError(f"{length} bytes in a file of {size}")
        entries = checked_json.loads(os.pread(stream.fileno(), length, _LENGTH.size))
        entries.pop("__metadata__", None)  # AttributeError: not an object
        spans = sorted((tuple(entry["data_offsets"]), key) for key, entry in entries.items())
        found = {}
        position = 0
        for (start, end), key in spans:
            dtype, (elements,) = entries[key]["dtype"], entries[key]["shape"]
            piece = Piece(key, dtype, count(elements))
            if {type(n) for n in (start, end)} != {int}:
                raise ValueError("sizes must be whole numbers")
            if start != position or end - start != piece.bytes:
                raise ValueError("the pieces overlap, leave gaps or have another size")
            found[key] = (piece, begin + start)
            position = end
        if begin + position != size:
            raise ValueError("the pieces do not fill the file")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InvalidSnapshotError(f"a data file's header is wrong: {error}") from error
    return found
