"""Read a snapshot's tensors: each data file once, checksummed on the way."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from ddpjob_trainer.snapshot.ondisk import data_file, manifest
from ddpjob_trainer.snapshot.ondisk.data_file import Piece
from ddpjob_trainer.snapshot.ondisk.manifest import Chunk, DataFile, InvalidSnapshotError, Manifest
from ddpjob_trainer.state.codec import TORCH_DTYPES, Flat, unflatten

_PIECE = 4 << 20


def load(directory: Path, found: Manifest) -> Flat:
    """Read and check everything. Raises InvalidSnapshotError, OSError."""
    return assemble(found, {file.name: read_file(directory, file) for file in found.files})


def read_file(directory: Path, file: DataFile) -> torch.Tensor:
    """Return a data file's bytes (uint8). Raises InvalidSnapshotError, OSError."""
    with manifest.opened(directory, file) as stream:
        try:
            image = torch.empty(file.bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise InvalidSnapshotError(f"{file.name}: no memory for {file.bytes} bytes") from error
        view = memoryview(image.numpy().data)
        crc, position = 0, 0
        while position < len(view):
            count = stream.readinto(view[position : position + _PIECE])  # type: ignore[attr-defined]
            if not count:
                raise InvalidSnapshotError(f"{file.name} became shorter")
            crc = zlib.crc32(view[position : position + count], crc)
            position += count
    if crc != file.crc32:
        raise InvalidSnapshotError(f"{file.name} does not match its checksum")
    return image


def assemble(found: Manifest, images: Mapping[str, torch.Tensor]) -> Flat:
    """Return the state whose data files these are. Its tensors may share their memory.

    Raises InvalidSnapshotError.
    """
    pieces = {
        name: data_file.read_header(memoryview(image.numpy().data))
        for name, image in images.items()
    }
    by_tensor: dict[str, list[Chunk]] = {}
    for chunk in found.chunks:
        by_tensor.setdefault(chunk.tensor, []).append(chunk)
    tensors = {}
    for name, (dtype, shape) in found.tensors.items():
        parts = [
            _part(images[chunk.file], pieces[chunk.file], chunk, dtype)
            for chunk in sorted(by_tensor.get(name, ()), key=lambda chunk: chunk.start)
        ]
        whole = parts[0] if len(parts) == 1 else _joined(parts, TORCH_DTYPES[dtype])
        if whole.numel() != math.prod(shape):
            raise InvalidSnapshotError(f"{name} is incomplete")
        tensors[name] = whole.view(shape)
    flat = Flat(found.tree, tensors, dict(found.aliases))
    try:
        unflatten(flat)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise InvalidSnapshotError(f"the manifest's tree is wrong: {error}") from error
    return flat


def _joined(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _part(
    image: torch.Tensor, pieces: Mapping[str, tuple[Piece, int]], chunk: Chunk, dtype: str
) -> torch.Tensor:
    piece, offset = pieces.get(chunk.key, (None, 0))
    if piece is None or piece.dtype != dtype or piece.count != chunk.count:
        raise InvalidSnapshotError(f"{chunk.file} does not hold {chunk.key} as the manifest says")
    content = image[offset : offset + piece.bytes]
    if content.data_ptr() % TORCH_DTYPES[dtype].itemsize:
        content = content.clone()  # not written by us: ours are aligned
    return content.view(TORCH_DTYPES[dtype])
