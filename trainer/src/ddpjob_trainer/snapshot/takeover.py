"""The snapshot directory: find the newest valid snapshot, take it over, start an incarnation.

Only rank 0 does this; ``load`` is how it reads what it found, together with the other ranks.
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
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError, Manifest
from ddpjob_trainer.state.codec import Flat

_QUARANTINE = ".invalid"
_OPEN_ATTEMPTS = 20
_UNREADABLE = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)

Tell = Callable[[str], None]
#: Directory, manifest -> state. Raises InvalidSnapshotError, OSError.
Load = Callable[[Path, Manifest], Flat]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid snapshot, in memory."""

    step: int
    config: Mapping[str, Any]
    flat: Flat


def open_store(
    root: Path, identity: Identity, *, resume: bool, load: Load, tell: Tell
) -> tuple[Start, Loaded | None]:
    """Start this incarnation from the newest valid snapshot; return its record as well.

    Raises OSError, PeerLostError.
    """
    root.mkdir(parents=True, exist_ok=True)
    if not identity.unique:
        # torchrun and a bare python repeat their names, and no zombie can have this one.
        identity = replace(identity, uid=f"{identity.uid}-{secrets.token_hex(8)}")
    for attempt in range(_OPEN_ATTEMPTS):
        # A live zombie may remove what we are about to take: then look again.
        try:
            return _Opening(root, identity, load, tell).run(resume)
        except FileNotFoundError:
            if attempt == _OPEN_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


class _Opening:
    """One try of it."""

    def __init__(self, root: Path, identity: Identity, load: Load, tell: Tell) -> None:
        self._root = root
        self._identity = identity
        self._load = load
        self._tell = tell
        self._unreadable: OSError | None = None

    def run(self, resume: bool) -> tuple[Start, Loaded | None]:
        root, identity = self._root, self._identity
        lineage.refuse_if_stale(lineage.read_starts(root), identity)
        sequence = lineage.claim(root)
        starts = lineage.read_starts(root, self._tell)
        lineage.refuse_if_stale(starts, identity)
        loaded: Loaded | None = None
        parent = 0
        head = lineage.newest(starts)
        # Without resume a job starts anew, but its later attempts continue what it began itself.
        if resume or (head is not None and head.uid == identity.uid):
            for parent, limit in lineage.chain(starts):
                source = lineage.directory(root, parent)
                loaded = self._adopt(source, lineage.directory(root, sequence), limit)
                if loaded is not None:
                    break
        if loaded is None and self._unreadable is not None:
            raise self._unreadable  # rather than start from nothing
        start = Start(
            sequence,
            identity.uid,
            identity.attempt,
            identity.round,
            parent if loaded else 0,
            loaded.step if loaded else -1,
            lineage.predecessors(starts, identity.uid),
        )
        lineage.write_start(root, start)
        return start, loaded

    def _adopt(self, source: Path, ours: Path, limit: int | None) -> Loaded | None:
        """Bring the newest valid snapshot of another directory into ours, and load it."""
        for path in reversed(manifest.listed(source)):
            step = manifest.step_of(path)
            if step is None or (limit is not None and step > limit):
                continue
            try:
                found = manifest.read(path)
                for file in found.files:
                    if not (source / file.name).is_file() and path.exists():
                        raise InvalidSnapshotError(f"{file.name} is missing or no regular file")
                    with contextlib.suppress(FileExistsError):
                        disk.link_or_copy(source / file.name, ours / file.name)
                flat = self._load(ours, found)
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
            temporary = ours / f"{path.name}.tmp"
            disk.write_new(temporary, [found.encode()])
            disk.publish(temporary, ours / path.name)
            return Loaded(found.step, found.config, flat)
        return None

    def _quarantine(self, path: Path, problem: InvalidSnapshotError) -> None:
        self._tell(f"snapshot {path.parent.name}/{path.name} is not usable: {problem}")
        with contextlib.suppress(OSError):
            path.rename(path.with_name(path.name + _QUARANTINE))
