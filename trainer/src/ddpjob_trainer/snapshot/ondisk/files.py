"""Write a rank's data file, commit a manifest, clean up, in its writer thread.

Commit protocol: data files under unique names, each written and fsynced; when all ranks' are
durable the manifest is written and fsynced under a temporary name, renamed, and the directory
fsynced. A process killed at any point leaves the snapshots that were valid before, and never
half a one that looks whole. Never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.disk import count
from ddpjob_trainer.snapshot.ondisk.manifest import ITEM_BYTES, InvalidSnapshotError

# --- Data files -----------------------------------------------------------------------------------
# The header is written so that every piece is aligned to its elements. Reading trusts nothing in
# it. Never imports torch.

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


def order_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort by element size, widest first: then no piece needs padding."""
    return sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype])


def data_header(pieces: Sequence[Piece]) -> bytes:
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
    text = disk.dump_json(entries)
    text += b" " * (-len(text) % _ALIGN)
    disk.check_json(text)
    return _LENGTH.pack(len(text)) + text


def read_data_header(stream: BinaryIO, size: int) -> Mapping[str, tuple[Piece, int]]:
    """Return each piece and its offset in a file of ``size`` bytes.

    Raises OSError, InvalidSnapshotError for everything that safetensors does not allow.
    """
    try:
        (length,) = _LENGTH.unpack(os.pread(stream.fileno(), _LENGTH.size, 0))
        begin = _LENGTH.size + length
        if begin > min(disk.MAX_JSON_BYTES, size):
            raise ValueError(f"{length} bytes in a file of {size}")
        entries = disk.load_json(os.pread(stream.fileno(), length, _LENGTH.size))
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


# --- Commit ---------------------------------------------------------------------------------------

#: Small enough that the checksum finds the bytes in cache.
_PIECE = 4 << 20
#: A part of at least so many bytes is written past the page cache: copying it there and flushing
#: it costs the cores that train more than all else, and it would push the data set out. Smaller
#: ones cost nothing, and a restart in place reads them back from the cache.
PAST_CACHE_BYTES = 16 << 20


def data_name(step: int, nonce: str, rank: int) -> str:
    """Name a rank's data file. ``nonce``: the incarnation's own, so no two files share it."""
    return f"step-{step:012d}-{nonce}-{rank}.safetensors"


def write_summed(
    path: Path, pieces: Iterable[bytes | memoryview], *, past_cache: bool = False
) -> int:
    """Write a new file durably, as disk.write_new(); return its CRC-32. Raises OSError."""
    crc = 0

    def summed() -> Iterator[bytes | memoryview]:
        nonlocal crc
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            yield piece

    disk.write_new(path, summed(), past_cache=past_cache)
    return crc


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """One incarnation's directory. After an error older snapshots stand."""

    root: Path
    sequence: int
    nonce: str
    keep: int

    @property
    def directory(self) -> Path:
        """Return where all ranks of this incarnation write."""
        return lineage.directory(self.root, self.sequence)

    def write(self, name: str, content: memoryview) -> int:
        """Make a data file durable; return its CRC-32. Raises OSError."""
        pieces = (content[at : at + _PIECE] for at in range(0, len(content), _PIECE))
        large = len(content) >= PAST_CACHE_BYTES
        return write_summed(self.directory / name, pieces, past_cache=large)

    def commit(self, step: int, content: bytes) -> None:
        """Publish the manifest of a step whose data files are durable. Raises OSError."""
        try:
            disk.commit(self.directory / manifest.file_name(step), content)
        except BaseException:
            self.discard(step)
            raise

    def discard(self, step: int) -> None:
        """Remove all ranks' files of a step that was not committed.

        They stay if the rename, though perhaps not yet durable, was done.
        """
        with contextlib.suppress(OSError):
            final = manifest.file_name(step)
            if disk.exists(self.directory / final):
                return
            for name in disk.names(self.directory):
                if name.startswith((f"step-{step:012d}-", f"{final}.")):
                    with contextlib.suppress(OSError):
                        disk.remove(self.directory / name)


# --- Retention ------------------------------------------------------------------------------------

_STEP = re.compile(r"step-([0-9]{1,15})\b.*", re.DOTALL)
_OURS = re.compile(r"start\.json|step-[0-9]")


def retain(
    root: Path, sequence: int, keep: int, verified: Container[int], busy: Container[int] = ()
) -> None:
    """Keep the newest ``keep`` snapshots of an incarnation and what its chain needs.

    One counts if it is among the ``verified`` steps and its files are there. Others take no place
    of one that counts: as many more of them stay, those that are ``busy`` being read, and the last
    verified one though this rank may not see its files. What cannot be removed now is left for the
    next time.
    """
    with contextlib.suppress(OSError):
        directory = lineage.directory(root, sequence)
        found = _Folder(directory)
        known = [path for path in found.named if manifest.step_of(path.name) in verified]
        good = [path for path in known if path in found.whole][-keep:]
        others = [path for path in found.named if path not in good]
        late = [path for path in others if len(good) < keep or path > good[0]]
        read = [path for path in late if manifest.step_of(path.name) in busy]
        for path in found.named.keys() - {*good, *late[-keep:], *read, *known[-1:]}:
            if _remove(path):
                del found.named[path]
        if good and not found.unread:
            _remove_leftovers(directory, good[-1], set().union(*found.named.values()))
        _retain_chain(lineage.Disk(root), sequence, keep, verified)


class _Folder:
    """The manifests of a directory that say what they consist of, by step.

    What only has the name of a manifest must not take the place of a snapshot. ``named``: to data
    files. ``whole``: those whose files are there in their sizes. ``unread``: those that
    this rank cannot read now: their data files stay.
    """

    def __init__(self, directory: Path) -> None:
        self.named: dict[Path, set[str]] = {}
        self.whole: list[Path] = []
        self.unread: list[Path] = []
        for path in manifest.listed(directory):
            try:
                files = _data_files(path, os.lstat(path).st_mtime_ns)
            except (InvalidSnapshotError, OSError):
                self.unread.append(path)
                continue
            self.named[path] = {name for name, _ in files}
            with contextlib.suppress(FileNotFoundError):
                if all((directory / n).lstat().st_size == size for n, size in files):
                    self.whole.append(path)


@lru_cache(16)
def _data_files(path: Path, written: int) -> frozenset[tuple[str, int]]:
    """Read a manifest once. To parse a large one keeps the interpreter from the training thread."""
    return frozenset((file.name, file.bytes) for file in manifest.read(path).files)


def _remove_ours(directory: Path) -> None:
    """Remove a directory of ours, with a record or our files only. One named by a date stays."""
    with contextlib.suppress(OSError):
        names = disk.names(directory)
        if lineage.START in names or all(map(_OURS.match, names)):
            disk.remove_tree(directory)


def _remove(path: Path) -> bool:
    """Remove a file; return whether it is gone."""
    with contextlib.suppress(OSError):
        disk.remove(path)
        return True
    return False


def _remove_leftovers(directory: Path, newest: Path, kept: set[str]) -> None:
    """Remove files of removed, failed and abandoned snapshots. One still being written stays."""
    step = manifest.step_of(newest.name)
    for name in disk.names(directory):
        number = _STEP.fullmatch(name)
        if number is None or name in kept or manifest.step_of(name) is not None:
            continue
        if step is None or int(number[1]) <= step:
            _remove(directory / name)


def _retain_chain(
    folders: lineage.Disk, sequence: int, keep: int, verified: Container[int]
) -> None:
    """Remove earlier directories that our chain needs no more, and surplus copies in it."""
    taken = folders.numbers()
    unread: dict[int, Exception] = {}
    starts = {} if taken[:1] in ([], [sequence]) else lineage.read_starts(folders, unread)
    mine = starts.get(sequence)
    if mine is None or lineage.heads(starts, mine.uid)[0] != mine:
        return  # we may be the zombie
    copies: Counter[int] = Counter()

    def steps_of(number: int, limit: int | None) -> set[int]:
        found = _Folder(lineage.directory(folders.root, number))
        steps = {p: s for p in found.whole if (s := manifest.step_of(p.name)) is not None}
        counting = {p: s for p, s in steps.items() if limit is None or s <= limit}
        for path, step in counting.items():
            copies[step] += 1
            if copies[step] > keep and number != sequence:
                _remove_copy(path, found.named)
        return {s for s in counting.values() if number != sequence or s in verified}

    spared = lineage.last_of_others(folders, starts, sequence)
    for number in lineage.unneeded(starts, taken, sequence, keep, steps_of, unread):
        directory = lineage.directory(folders.root, number)
        if number in spared:
            found = _Folder(directory)
            for path in found.whole[:-2]:  # we do not know which of them was read back
                _remove_copy(path, found.named)
        else:
            _remove_ours(directory)


def _remove_copy(path: Path, named: dict[Path, set[str]]) -> None:
    """Remove a snapshot that others of its directory do not need.

    ``named``: the data files of all of them.
    """
    _remove(path)
    for name in named.pop(path).difference(*named.values()):
        _remove(path.parent / name)
