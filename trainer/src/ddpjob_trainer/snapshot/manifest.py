"""The manifest: what a snapshot consists of. Present and its checksums right = valid."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ddpjob_trainer.snapshot.format import TORCH_DTYPES, Chunk, Flat
from ddpjob_trainer.snapshot.sealed import seal, unseal

VERSION = 1
_MAX_BYTES = 1 << 30


class InvalidSnapshotError(Exception):
    """A snapshot that must not be used: damaged, incomplete, or of another format."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file and what it must look like."""

    name: str
    bytes: int
    crc32: int


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
        """Return JSON whose last field is the SHA-256 of all before it."""
        body: dict[str, Any] = {
            "format": "ddpjob-snapshot",
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
    """Name of a step's manifest; sorts by step."""
    return f"step-{step:012d}.json"


def step_of(path: Path) -> int | None:
    """Step in a manifest's name, None for other files."""
    stem = path.name.removeprefix("step-").removesuffix(".json")
    return int(stem) if path.name == f"step-{stem}.json" and stem.isdigit() else None


def read(path: Path) -> Manifest:
    """Read a manifest and check it against its own checksum.

    Raises InvalidSnapshotError, OSError.
    """
    if path.is_symlink():
        raise InvalidSnapshotError("the manifest is a symbolic link")
    if path.stat().st_size > _MAX_BYTES:
        raise InvalidSnapshotError("the manifest is too large")
    try:
        body = unseal(path.read_bytes())
        if body["format"] != "ddpjob-snapshot" or body["version"] != VERSION:
            raise InvalidSnapshotError(
                f"format {body['format']} version {body['version']} is not known"
            )
        return Manifest(
            step=body["step"],
            config=body["config"],
            files=tuple(DataFile(**file) for file in body["files"]),
            tensors={name: (dtype, tuple(s)) for name, (dtype, s) in body["tensors"].items()},
            chunks=tuple(Chunk(**chunk) for chunk in body["chunks"]),
            aliases=body["aliases"],
            tree=body["tree"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSnapshotError(f"the manifest cannot be read: {error}") from error


def verify(directory: Path, manifest: Manifest) -> None:
    """Compare every data file's size and checksum. Raises InvalidSnapshotError."""
    for file in manifest.files:
        path = directory / file.name
        if Path(file.name).name != file.name or path.is_symlink():
            raise InvalidSnapshotError(f"{file.name} is not a plain file name")
        try:
            size = path.stat().st_size
            if size != file.bytes:
                raise InvalidSnapshotError(f"{file.name} has {size} bytes instead of {file.bytes}")
            crc = 0
            with path.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    crc = zlib.crc32(piece, crc)
        except FileNotFoundError:
            raise InvalidSnapshotError(f"{file.name} is missing") from None
        if crc != file.crc32:
            raise InvalidSnapshotError(f"{file.name} does not match its checksum")


def load(directory: Path, manifest: Manifest) -> Flat:
    """Verify and read all tensors, into memory that belongs to the caller.

    Raises InvalidSnapshotError.
    """
    verify(directory, manifest)
    tensors = {}
    for name, (dtype, shape) in manifest.tensors.items():
        if dtype not in TORCH_DTYPES:
            raise InvalidSnapshotError(f"{name} has the unknown type {dtype}")
        tensors[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    by_file: dict[str, list[Chunk]] = {}
    for chunk in manifest.chunks:
        by_file.setdefault(chunk.file, []).append(chunk)
    filled = dict.fromkeys(tensors, 0)
    try:
        for file, chunks in by_file.items():
            with safe_open(directory / file, framework="pt") as stored:
                for chunk in chunks:
                    target = tensors[chunk.tensor].view(-1)
                    target[chunk.start : chunk.start + chunk.count].copy_(
                        stored.get_tensor(chunk.key)
                    )
                    filled[chunk.tensor] += chunk.count
    except (SafetensorError, KeyError, RuntimeError, OSError) as error:
        raise InvalidSnapshotError(f"{file}: {error}") from error
    for name, tensor in tensors.items():
        if filled[name] != tensor.numel():
            raise InvalidSnapshotError(f"{name} is incomplete")
    return Flat(manifest.tree, tensors, dict(manifest.aliases))
