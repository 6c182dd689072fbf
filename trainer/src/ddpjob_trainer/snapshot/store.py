"""The snapshot directory: open it (find the parent, start an incarnation), save, keep few.

Commit protocol: data files under unique names, each written and fsynced; the manifest written
and fsynced under a temporary name; renamed; the directory fsynced. A process killed at any
point leaves the snapshots that were valid before, and never half a one that looks whole.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.snapshot import disk, lineage, manifest
from ddpjob_trainer.snapshot.format import DTYPES, Chunk, Flat, Writing
from ddpjob_trainer.snapshot.manifest import DataFile, InvalidSnapshotError, Manifest

_CHUNK_BYTES = 64 << 20
_QUARANTINE = ".invalid"
_OPEN_ATTEMPTS = 20
_UNREADABLE = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid snapshot, in memory."""

    step: int
    config: Mapping[str, Any]
    flat: Flat


class SnapshotStore:
    """One incarnation's directory below ``root``. Used by one rank only."""

    def __init__(self, root: Path, sequence: int, keep: int, tell: Tell) -> None:
        self._root = root
        self._sequence = sequence
        self._directory = lineage.directory(root, sequence)
        self._keep = keep
        self._tell = tell
        self._unreadable: OSError | None = None

    @classmethod
    def open(
        cls, root: Path, identity: Identity, *, keep: int, resume: bool, tell: Tell
    ) -> tuple[SnapshotStore, Loaded | None]:
        """Start this incarnation from the newest valid snapshot. Raises OSError, PeerLostError."""
        root.mkdir(parents=True, exist_ok=True)
        if not identity.unique:
            # torchrun and a bare python repeat their names, and no zombie can have this one.
            identity = replace(identity, uid=f"{identity.uid}-{secrets.token_hex(8)}")
        for attempt in range(_OPEN_ATTEMPTS):
            # A live zombie may remove what we are about to take: then look again.
            try:
                return cls._open_once(root, identity, keep, resume, tell)
            except FileNotFoundError:
                if attempt == _OPEN_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _open_once(
        cls, root: Path, identity: Identity, keep: int, resume: bool, tell: Tell
    ) -> tuple[SnapshotStore, Loaded | None]:
        lineage.refuse_if_stale(lineage.read_starts(root), identity)
        store = cls(root, lineage.claim(root), keep, tell)
        starts = lineage.read_starts(root, tell)
        lineage.refuse_if_stale(starts, identity)
        loaded: Loaded | None = None
        parent = 0
        head = lineage.newest(starts)
        # Without resume a job starts anew, but its later attempts continue what it began itself.
        if resume or (head is not None and head.uid == identity.uid):
            for sequence, limit in lineage.chain(starts):
                loaded = store._adopt(lineage.directory(root, sequence), limit)
                if loaded is not None:
                    parent = sequence
                    break
        if loaded is None and store._unreadable is not None:
            raise store._unreadable  # rather than start from nothing
        step = loaded.step if loaded else -1
        lineage.write_start(
            root,
            lineage.Start(
                store._sequence,
                identity.uid,
                identity.attempt,
                identity.round,
                parent,
                step,
                lineage.predecessors(starts, identity.uid),
            ),
        )
        store._retain()
        return store, loaded

    def _adopt(self, source: Path, limit: int | None) -> Loaded | None:
        """Bring the newest valid snapshot of another directory into ours, and load it."""
        for path in reversed(_manifests(source)):
            step = manifest.step_of(path)
            if step is None or (limit is not None and step > limit):
                continue
            try:
                found = manifest.read(path)
                for file in found.files:
                    if Path(file.name).name != file.name:
                        raise InvalidSnapshotError(f"{file.name} is not a plain file name")
                    if not (source / file.name).exists() and path.exists():
                        raise InvalidSnapshotError(f"{file.name} is missing")
                    with contextlib.suppress(FileExistsError):
                        disk.link_or_copy(source / file.name, self._directory / file.name)
                flat = manifest.load(self._directory, found)
            except InvalidSnapshotError as problem:
                self._quarantine(path, problem)
                continue
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise
                # Not put aside: another node may be able to read it.
                self._tell(f"snapshot {source.name}/{path.name} cannot be read: {error}")
                self._unreadable = error
                continue
            target = self._directory / path.name
            temporary = self._directory / f"{path.name}.tmp"
            disk.write_new(temporary, [found.encode()])
            disk.publish(temporary, target)
            return Loaded(found.step, found.config, flat)
        return None

    def _quarantine(self, path: Path, problem: InvalidSnapshotError) -> None:
        self._tell(f"snapshot {path.parent.name}/{path.name} is not usable: {problem}")
        with contextlib.suppress(OSError):
            path.rename(path.with_name(path.name + _QUARANTINE))

    # --- Save ----------------------------------------------------------------------------

    def save(self, step: int, flat: Flat, config: Mapping[str, Any]) -> int:
        """Commit a snapshot durably; return its size in bytes. Raises OSError.

        After an error nothing of it is left, and the older snapshots stand.
        """
        nonce = secrets.token_hex(4)
        name = f"step-{step:012d}-{nonce}-0.safetensors"
        temporary = self._directory / f"step-{step:012d}-{nonce}.json.tmp"
        chunks, parts = _plan(flat, name)
        writing = Writing(parts)
        try:
            disk.write_new(self._directory / name, writing.pieces())
            content = Manifest(
                step=step,
                config=config,
                files=(DataFile(name, writing.bytes, writing.crc32),),
                tensors={n: (DTYPES[t.dtype], tuple(t.shape)) for n, t in flat.tensors.items()},
                chunks=chunks,
                aliases=flat.aliases,
                tree=flat.tree,
            )
            disk.write_new(temporary, [content.encode()])
            disk.publish(temporary, self._directory / manifest.file_name(step))
        except OSError:
            self._discard(temporary, self._directory / name, step)
            raise
        self._retain()
        return writing.bytes

    def _discard(self, temporary: Path, data: Path, step: int) -> None:
        """After a failed save. The data stays if the rename, though not yet durable, was done."""
        with contextlib.suppress(OSError):
            if not (self._directory / manifest.file_name(step)).exists():
                disk.remove(temporary)
                disk.remove(data)

    def _retain(self) -> None:
        """Remove what is no longer needed, now that a newer snapshot is durable."""
        with contextlib.suppress(OSError, InvalidSnapshotError):
            ours = _manifests(self._directory)
            for path in ours[: -self._keep]:
                disk.remove(path)
            kept = {f.name for p in ours[-self._keep :] for f in manifest.read(p).files}
            for path in self._directory.glob("step-*"):
                if path.suffix != ".json" and path.name not in kept:
                    disk.remove(path)
            for sequence in self._unneeded():
                disk.remove_tree(lineage.directory(self._root, sequence))

    def _unneeded(self) -> list[int]:
        """Directories older than those that hold the newest ``keep`` steps of our chain."""
        taken = lineage.sequences(self._root)
        if taken[0] == self._sequence:
            return []
        starts = lineage.read_starts(self._root)
        mine = starts.get(self._sequence)
        if mine is None or lineage.newest(starts) != mine:
            return []  # we may be the zombie
        needed: set[int] = set()
        steps: set[int] = set()
        for sequence, limit in lineage.chain(starts):
            needed.add(sequence)
            for path in _manifests(lineage.directory(self._root, sequence)):
                step = manifest.step_of(path)
                if step is not None and (limit is None or step <= limit):
                    steps.add(step)
            if len(steps) >= self._keep:
                return [n for n in taken if n < self._sequence and n not in needed]
        return []  # a short chain: an earlier run's snapshots may still be somebody's last


def _manifests(directory: Path) -> list[Path]:
    """Manifests by step, oldest first. Raises FileNotFoundError when a zombie removed it."""
    return sorted(path for path in directory.iterdir() if manifest.step_of(path) is not None)


def _plan(flat: Flat, file: str) -> tuple[tuple[Chunk, ...], list[tuple[str, Any]]]:
    """Cut every tensor into chunks of bounded size. Empty ones have no chunk."""
    chunks, parts = [], []
    for name, tensor in flat.tensors.items():
        whole = tensor.detach().contiguous().view(-1)
        most = max(1, _CHUNK_BYTES // tensor.element_size())
        for start in range(0, whole.numel(), most):
            piece = whole[start : start + most]
            key = f"{name}@{start}"
            chunks.append(Chunk(name, start, piece.numel(), file, key))
            parts.append((key, piece))
    return tuple(chunks), parts
