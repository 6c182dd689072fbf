"""Define the manifest: a snapshot's contents. Present and its checksums right = valid.

What it says is checked before anything is allocated, so a manifest made to do harm costs no more
memory than its data files have bytes, and than disk.py allows for the JSON itself. Never
imports torch: the object store's process uses it too.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import disk
from ddpjob_trainer.snapshot.ondisk.disk import MAX_JSON_BYTES, count, seal, unseal

FORMAT = "ddpjob-snapshot"
VERSION = 2  # of the format; this program reads 1 to this one
#: Bytes of one element, by safetensors' names of element types.
ITEM_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
_MAX_DIMENSIONS = 64
_PIECE = 4 << 20
_MANIFEST = re.compile(r"step-([0-9]{12,15})\.json")
_DATA_FILE = re.compile(r"step-[0-9]{12,15}-[0-9A-Za-z]{1,64}-[0-9]{1,12}\.safetensors")
_MAX_MESSAGE = 300


class InvalidSnapshotError(Exception):
    """A snapshot that must not be used: damaged, incomplete, or of another format."""

    def __init__(self, text: str) -> None:
        # It may quote what a stranger wrote: no line breaks, nothing that a terminal obeys.
        plain = "".join(letter if letter.isprintable() else "?" for letter in text)
        super().__init__(plain[:_MAX_MESSAGE])


class NewerFormatError(InvalidSnapshotError, ValueError):
    """A sound manifest of a newer ddpjob-trainer, to be left to that."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: it was written by a newer ddpjob-trainer; use that one")

    @property
    def refusal(self) -> ConfigError:
        """Return what to say where nothing else is to go on from."""
        return ConfigError(
            f"there are snapshots, and none can be read: {self}, or start over in another snapshot"
            " directory or with snapshot.resume: Never"
        )


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file and what it must look like."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` elements of a tensor from ``start`` on, stored flat under ``key`` in a file."""

    tensor: str
    start: int
    count: int
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about one snapshot but the tensors' bytes."""

    step: int
    config: Mapping[str, Any]  # of the run that wrote it
    files: tuple[DataFile, ...]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
    chunks: tuple[Chunk, ...]
    aliases: Mapping[str, str]
    tree: Any

    def encode(self) -> bytes:
        """Return sealed JSON. Raises ValueError when it is too large to be read again."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "config": dict(self.config),
            "files": [asdict(file) for file in self.files],
            "tensors": {name: [dtype, list(s)] for name, (dtype, s) in self.tensors.items()},
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "aliases": dict(self.aliases),
            "tree": self.tree,
        }
        return seal(body)


def file_name(step: int) -> str:
    """Name a step's manifest; sorts by step."""
    return f"step-{step:012d}.json"


def step_of(name: str) -> int | None:
    """Return the step in a manifest's name, None for other files."""
    found = _MANIFEST.fullmatch(name)
    step = int(found[1]) if found else None
    return step if step is not None and name == file_name(step) else None


def steps(names: Iterable[str]) -> list[int]:
    """Return the steps whose manifests are among the names of a folder, ascending."""
    return sorted(step for name in names if (step := step_of(name)) is not None)


def listed(directory: Path) -> list[Path]:
    """List manifests by step, oldest first. Raises OSError."""
    return [directory / file_name(step) for step in steps(disk.names(directory))]


def read(path: Path) -> Manifest:
    """Read a manifest and check it. Raises InvalidSnapshotError, OSError."""
    try:
        data = disk.read_bounded(path, MAX_JSON_BYTES)
    except disk.NotAFileError:
        raise InvalidSnapshotError("the manifest is not a regular file") from None
    return decode(data, step_of(path.name))


def decode(data: bytes, step: int | None = None) -> Manifest:
    """Read what encode() returned. ``step``: that of its name. Raises InvalidSnapshotError."""
    try:
        body = unseal(data)
        _check_version(body)
        found = Manifest(
            step=count(body["step"]),
            config=dict(body["config"]),
            files=tuple(DataFile(**file) for file in body["files"]),
            tensors={name: (dtype, tuple(s)) for name, (dtype, s) in body["tensors"].items()},
            chunks=tuple(Chunk(**chunk) for chunk in body["chunks"]),
            aliases=dict(body["aliases"]),
            tree=body["tree"],
        )
        _check(found)
        if step not in (None, found.step):
            raise ValueError(f"it is that of step {found.step}")
    except NewerFormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSnapshotError(f"the manifest cannot be read: {error}") from error
    return found


def _check_version(body: Mapping[str, Any]) -> None:
    if body["format"] != FORMAT:
        raise InvalidSnapshotError(f"format {body['format']!r} is not known")
    if count(body["version"]) not in range(1, VERSION + 1):
        text = f"format version {body['version']} is not known (this program reads 1 to {VERSION})"
        raise NewerFormatError(text) if body["version"] else InvalidSnapshotError(text)


def _check(found: Manifest) -> None:
    """Check that every size adds up. Raises ValueError, KeyError."""
    sizes = {}
    for file in found.files:
        if not isinstance(file.name, str) or not _DATA_FILE.fullmatch(file.name):
            raise ValueError(f"{str(file.name)[:99]!r} is no data file's name")
        sizes[file.name] = count(file.bytes)
        count(file.crc32)
    if len(sizes) != len(found.files):
        raise ValueError("a data file is named twice")
    counts = {}
    for name, (dtype, shape) in found.tensors.items():
        if dtype not in ITEM_BYTES or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has the type {dtype!r} and {len(shape)} dimensions")
        count(math.prod(max(count(n), 1) for n in shape))  # strides, also of what is empty
        counts[name] = math.prod(shape)
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in counts}
    for chunk in found.chunks:
        if not isinstance(chunk.key, str):
            raise ValueError("a chunk's key must be a text")
        spans[chunk.tensor].append((count(chunk.start), count(chunk.count)))
        sizes[chunk.file] -= chunk.count * ITEM_BYTES[found.tensors[chunk.tensor][0]]
    for name, parts in spans.items():
        _check_spans(name, sorted(parts), counts[name])
    if any(left < 0 for left in sizes.values()):
        raise ValueError("the chunks are larger than their data file")
    if any(left > MAX_JSON_BYTES + 8 for left in sizes.values()):
        raise ValueError("a data file is larger than what it holds")
    if any(target not in counts for target in found.aliases.values()):
        raise ValueError("an alias names no tensor")


def _check_spans(name: str, parts: Sequence[tuple[int, int]], total: int) -> None:
    position = 0
    for start, length in parts:
        if start != position:
            raise ValueError(f"{name} is incomplete, or its chunks overlap")
        position += length
    if position != total:
        raise ValueError(f"{name} is incomplete")


def checksum(
    stream: BinaryIO, file: DataFile, after: Callable[[int], None] = lambda _: None
) -> int:
    """Return the CRC-32 of a data file's bytes, and not of more. Raises InvalidSnapshotError.

    ``after`` is called with how many bytes each read gave.
    """
    buffer = memoryview(bytearray(min(_PIECE, file.bytes)))
    crc, left = 0, file.bytes
    while left:
        count = stream.readinto(buffer[: min(left, _PIECE)])  # type: ignore[attr-defined]
        if not count:
            raise InvalidSnapshotError(f"{file.name} became shorter")
        crc = zlib.crc32(buffer[:count], crc)
        left -= count
        after(count)
    return crc


def opened(directory: Path, file: DataFile) -> BinaryIO:
    """Open a data file that has its size. Raises InvalidSnapshotError, OSError."""
    try:
        stream = disk.open_file(directory / file.name)
    except FileNotFoundError:
        raise InvalidSnapshotError(f"{file.name} is missing") from None
    except disk.NotAFileError:
        raise InvalidSnapshotError(f"{file.name} is not a regular file") from None
    size = os.fstat(stream.fileno()).st_size
    if size != file.bytes:
        stream.close()
        raise InvalidSnapshotError(f"{file.name} has {size} bytes instead of {file.bytes}")
    return stream
