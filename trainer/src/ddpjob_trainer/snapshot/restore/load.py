"""Read a snapshot's tensors one by one, after a check of every data file.

What is read goes straight to where it belongs, through one small buffer, so that a process which
resumes needs no second copy of its state.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import files, manifest
from ddpjob_trainer.snapshot.ondisk.files import Piece
from ddpjob_trainer.snapshot.ondisk.manifest import (
    ITEM_BYTES,
    Chunk,
    DataFile,
    InvalidSnapshotError,
    Manifest,
)
from ddpjob_trainer.snapshot.weights import uncompiled
from ddpjob_trainer.state.codec import (
    TORCH_DTYPES,
    Flat,
    has_memory,
    member,
    tensor_names,
    unflatten,
)

# --- Bytes ----------------------------------------------------------------------------------------

_WINDOW_BYTES = 16 << 20  # a larger chunk, as older versions wrote, is read alone
_ALIGN = 8

Offsets = Mapping[str, int]  # key of a piece -> where it begins in its file


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A chunk of so many bytes, to lie at ``at`` of a buffer."""

    chunk: Chunk
    bytes: int
    at: int


#: Fills a buffer with spans of one data file. Raises OSError.
Fetch = Callable[[DataFile, Sequence[FileSpan], torch.Tensor], None]


# --- Check ------------------------------------------------------------------------------------


def by_file(found: Manifest) -> dict[str, list[Chunk]]:
    """Return what each data file holds."""
    chunks: dict[str, list[Chunk]] = {file.name: [] for file in found.files}
    for chunk in found.chunks:
        chunks[chunk.file].append(chunk)
    return chunks


def verify_file(
    directory: Path, found: Manifest, file: DataFile, chunks: Sequence[Chunk]
) -> Offsets:
    """Compare a file with checksum and ``chunks``. Raises InvalidSnapshotError, OSError."""
    with manifest.opened(directory, file) as stream:
        pieces = files.read_data_header(stream, file.bytes)
        if manifest.checksum(stream, file) != file.crc32:
            raise InvalidSnapshotError(f"{file.name} does not match its checksum")
    for chunk in chunks:
        wanted = Piece(chunk.key, found.tensors[chunk.tensor][0], chunk.count)
        if chunk.key not in pieces or pieces[chunk.key][0] != wanted:
            raise InvalidSnapshotError(
                f"{file.name} does not hold {chunk.key} as the manifest says"
            )
    return {key: offset for key, (_, offset) in pieces.items()}


# --- Read -------------------------------------------------------------------------------------


class Source:
    """A valid snapshot. With a ``fetch`` that is collective, so is read()."""

    def __init__(self, found: Manifest, fetch: Fetch) -> None:
        self.manifest = found
        self._fetch = fetch
        self._chunks = by_file(found)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def step(self) -> int:
        """Return the step after which it was made."""
        return self.manifest.step

    @cached_property
    def outline(self) -> Any:
        """Return the state, its tensors without content. Raises InvalidSnapshotError."""
        found = self.manifest
        try:
            tensors = {name: _placeholder(*shape) for name, shape in found.tensors.items()}
            return unflatten(Flat(found.tree, tensors, dict(found.aliases)))
        except _WRONG as error:
            raise InvalidSnapshotError(f"the manifest's tree is wrong: {error}") from error

    def empty(
        self, names: Callable[[str], bool], device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """Allocate tensors to be read into. ``device``: of those with dimensions."""
        return {
            name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device if shape else None)
            for name, (dtype, shape) in self.manifest.tensors.items()
            if names(name)
        }

    def read(self, names: Callable[[str], bool], into: Mapping[str, torch.Tensor]) -> None:
        """Read the tensors of such names; those in ``into`` are put there.

        Collective: equal ``names`` on all ranks, ``into`` may differ. Raises OSError.
        """
        found = self.manifest
        wanted = {name for name in found.tensors if names(name)}
        targets = _Targets(into)
        odd = [n for n in wanted & into.keys() if tuple(into[n].shape) != found.tensors[n][1]]
        if odd:
            raise ValueError(f"what {odd[0]!r} is read into has another shape")
        for file in found.files:
            chunks = [chunk for chunk in self._chunks[file.name] if chunk.tensor in wanted]
            for window, size in self._windows(chunks):
                if len(self._buffer) < size:  # one for all, lest each leave a hole in memory
                    self._buffer = torch.empty(max(size, _WINDOW_BYTES), dtype=torch.uint8)
                self._fetch(file, window, self._buffer[:size])
                for span in window:
                    targets.put(span, self._buffer)

    def _windows(self, chunks: Sequence[Chunk]) -> Iterator[tuple[list[FileSpan], int]]:
        window: list[FileSpan] = []
        size = 0
        for chunk in chunks:
            length = chunk.count * ITEM_BYTES[self.manifest.tensors[chunk.tensor][0]]
            if window and size + length > _WINDOW_BYTES:
                yield window, size
                window, size = [], 0
            window.append(FileSpan(chunk, length, size))
            size += -(-length // _ALIGN) * _ALIGN
        if window:
            yield window, size


_WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


@functools.cache
def _base(dtype: str, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=TORCH_DTYPES[dtype])


def _placeholder(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Pairs may stand for complex numbers, and must lie beside each other to be seen as such.
    base = _base(dtype, 2 if shape[-1:] == (2,) else 1)
    return base.expand(shape) if shape else base[0]


class _Targets:
    """Tensors that are being read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._gathered: dict[str, tuple[torch.Tensor, list[int]]] = {}  # not in order in memory

    def put(self, span: FileSpan, buffer: torch.Tensor) -> None:
        tensor = self._tensors.get(span.chunk.tensor)
        if tensor is None:
            return
        tensor = tensor.detach()
        content = buffer[span.at : span.at + span.bytes].view(tensor.dtype)
        first = span.chunk.start
        if tensor.is_contiguous():
            tensor.view(-1)[first : first + len(content)].copy_(content)
        else:
            self._gather(span.chunk.tensor, tensor, first, content)

    def _gather(self, name: str, tensor: torch.Tensor, first: int, content: torch.Tensor) -> None:
        if name not in self._gathered:
            self._gathered[name] = torch.empty(tensor.numel(), dtype=tensor.dtype), [tensor.numel()]
        flat, left = self._gathered[name]
        flat[first : first + len(content)].copy_(content)
        left[0] -= len(content)
        if not left[0]:
            tensor.copy_(flat.view(tensor.shape))
            del self._gathered[name]


# --- By one process alone ---------------------------------------------------------------------


def read_spans(
    directory: Path,
    file: DataFile,
    offsets: Offsets,
    spans: Sequence[FileSpan],
    buffer: torch.Tensor,
) -> None:
    """Put spans of a data file into a buffer. Raises InvalidSnapshotError, OSError."""
    view = memoryview(buffer.numpy().data)
    with manifest.opened(directory, file) as stream:
        for span in spans:
            position = offsets[span.chunk.key]
            left = view[span.at : span.at + span.bytes]
            while left:
                count = os.preadv(stream.fileno(), [left], position)
                if not count:
                    raise InvalidSnapshotError(f"{file.name} became shorter")
                position, left = position + count, left[count:]


def open_source(directory: Path, found: Manifest) -> Source:
    """Check everything; what is read then comes from the files. Raises as verify_file()."""
    chunks = by_file(found)
    offsets = {f.name: verify_file(directory, found, f, chunks[f.name]) for f in found.files}
    source = Source(
        found, lambda file, *rest: read_spans(directory, file, offsets[file.name], *rest)
    )
    _ = source.outline
    return source


# --- Objects --------------------------------------------------------------------------------------
# All is compared before anything is overwritten. The model's tensors are read in place; an object
# gets new tensors, since load_state_dict() may keep those that it is given: what shared memory
# within it does so again.

_START_OVER = "start over in another snapshot directory or with snapshot.resume: Never"


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turn the errors of a state of another structure into ConfigError. Trying again is no use."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
            raise  # of a module's load_state_dict() only
        raise ConfigError(
            f"what the snapshot holds as {what} does not fit ({type(error).__name__}: {error}): use"
            f" the code that wrote it, or {_START_OVER}"
        ) from error


class Loader:
    """One snapshot on its way into memory. Every rank makes the same calls in the same order."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_model(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors of the model; they have the stored shapes. Raises ConfigError."""
        nodes = member(self._source.manifest.tree, "model")
        into: dict[str, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from
        for name, tensor in targets.items():
            target = tensor.detach()
            stored = next(iter(member(nodes, name).values()))
            stored = self._source.manifest.aliases.get(stored, stored)
            if target.is_conj() or not has_memory(target):
                plain = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                copies.append((target, plain))
                target = plain
            if target.is_complex():
                target = torch.view_as_real(target)
            if stored in into:
                copies.insert(0, (target, into[stored]))
            into.setdefault(stored, target)
        self._source.read(self._below("model/"), into)
        for target, source in copies:
            target.copy_(source)

    def _below(self, prefix: str) -> Callable[[str], bool]:
        """Tell whether a stored name, or an alias of it, is below a prefix."""
        aliases = self._source.manifest.aliases
        elsewhere = {target for name, target in aliases.items() if name.startswith(prefix)}
        return lambda name: name.startswith(prefix) or name in elsewhere

    def read_object(
        self,
        *path: str,
        into: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """Return the state below a path, in memory that no tensor of the model has.

        ``into``: tensors that may be overwritten at once, by their names below the path, where they
        have the stored shape. ``device``: where all others are to be that are more than a number.
        """
        prefix = "/".join(path) + "/"
        manifest = self._source.manifest
        node = manifest.tree
        for name in path:
            node = member(node, name)
        wanted = {manifest.aliases.get(name, name) for name in tensor_names(node)}
        tensors = self._source.empty(wanted.__contains__, device)
        for name, tensor in (into or {}).items():
            found = tensors.get(prefix + name)
            if found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype):
                tensors[prefix + name] = tensor
        self._source.read(self._below(prefix), tensors)
        return unflatten(Flat(node, tensors, dict(manifest.aliases)))

    def read_named(self, prefix: str, wanted: str) -> dict[str, torch.Tensor]:
        """Read all below a prefix; return what is below ``wanted``, the others' is passed over."""
        tensors = self._source.empty(lambda name: name.startswith(wanted))
        self._source.read(lambda name: name.startswith(prefix), tensors)
        return tensors


def check_tensors(
    stored: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], transient: Iterable[str]
) -> list[str]:
    """Compare names, shapes and types; return those to read. Raises ConfigError.

    ``transient``: caches that forward makes again as it needs them; they may differ.
    """
    caches = set(transient)
    odd = sorted((stored.keys() ^ mine.keys()) - caches)
    if odd and sorted(map(uncompiled, stored)) == sorted(map(uncompiled, mine)):
        raise ConfigError(
            "the snapshot belongs to a model that torch.compile() was given otherwise:"
            f" {odd[0]!r} is in only one of them. Compile as then, or {_START_OVER};"
            " run.prepare(..., compile=True) changes no name"
        )
    if odd:
        raise ConfigError(
            f"the snapshot belongs to another model: {odd[0]!r} is in only one of them"
            f" ({len(odd)} such names). Restore the model's code, or {_START_OVER}"
        )
    found = []
    for name, tensor in mine.items():
        source = stored.get(name)
        if source is not None and source.shape == tensor.shape and source.dtype == tensor.dtype:
            found.append(name)
        elif name not in caches and source is not None:
            raise ConfigError(
                f"the snapshot's {name} is {source.dtype} {list(source.shape)}, the"
                f" model's is {tensor.dtype} {list(tensor.shape)}. Restore the model's code, or"
                f" {_START_OVER}"
            )
    return found
