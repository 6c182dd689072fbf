"""The snapshot directory: find the newest valid snapshot, take it over, start an incarnation.

Only rank 0 does this; ``load`` is how it reads what it found, together with the other ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.load import Source
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import (
    InvalidSnapshotError,
    Manifest,
    NewerFormatError,
)
from ddpjob_trainer.snapshot.patience import PASSING, Patience

_OPEN_ATTEMPTS = 20
_DENIED = (errno.EACCES, errno.EPERM)
_UNREADABLE = (*PASSING, *_DENIED)
_ROOM = (
    "a start writes a list of what it takes over, and where there are no hard links a copy. Free"
    " some space or enlarge the volume; all snapshots in it stay"
)
_CURES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "a start writes there too. Mount the volume for writing; all snapshots in it stay",
}

Tell = Callable[[str], None]
Result = TypeVar("Result")
_Unreadable = OSError | NewerFormatError
#: Directory, manifest -> what is valid and can be read. Raises InvalidSnapshotError, OSError.
Load = Callable[[Path, Manifest], Source]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid snapshot, every byte of it checked."""

    source: Source

    @property
    def step(self) -> int:
        """After which it was made."""
        return self.source.manifest.step

    @property
    def config(self) -> Mapping[str, Any]:
        """Of the run that wrote it."""
        return self.source.manifest.config


def open_store(
    root: Path,
    identity: Identity,
    *,
    resume: bool,
    load: Load,
    tell: Tell,
    patience: Patience | None = None,
) -> tuple[Start, Loaded | None]:
    """Start this incarnation from the newest valid snapshot; return its record as well.

    ``patience``: with a disk that fails for a moment. Raises OSError, PeerLostError, ConfigError.
    """
    reader = _Reader(load, tell, patience or Patience())
    reader.patiently(partial(_make_root, root))
    if not identity.unique:
        # torchrun and a bare python repeat their names, and no zombie can have this one.
        identity = replace(identity, uid=f"{identity.uid}-{secrets.token_hex(8)}")
    for attempt in range(_OPEN_ATTEMPTS):
        # A live zombie may remove what we are about to take: then look again.
        try:
            return _Opening(root, identity, reader).run(resume)
        except FileNotFoundError:
            if attempt == _OPEN_ATTEMPTS - 1:
                raise
        except OSError as error:
            if error.errno in _CURES:
                error.strerror = f"{error.strerror}: {_CURES[error.errno]}"
                error.filename = str(root)
            raise
    raise AssertionError("unreachable")


def _make_root(root: Path) -> None:
    """Raises ConfigError for what trying again does not cure, OSError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            f"no snapshot directory can be made at {root}: what lies there, or above, is no"
            " directory. Remove it, or choose another snapshot directory (snapshot.path)"
        ) from None
    except PermissionError as error:
        raise _may_not_write(root, error) from None


def _may_not_write(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"user {os.geteuid()} cannot write to the snapshot directory {root}: {error.strerror}:"
        f" {error.filename}. Let that user write there (securityContext.runAsUser or fsGroup), or"
        " choose another snapshot directory (snapshot.path)"
    )


class _Reader:
    """Reads what was found, with one deadline for all that fails for a moment."""

    def __init__(self, load: Load, tell: Tell, patience: Patience) -> None:
        self.load = load
        self.tell = tell
        self._patience = patience
        self._deadline = patience.deadline()

    def patiently(self, action: Callable[[], Result]) -> Result:
        """Raises the action's last error."""
        return self._patience.call(action, self.tell, self._deadline)

    def starts(self, root: Path) -> tuple[dict[int, Start], _Unreadable | None]:
        """Every readable start record, and why another one could not be read, if so."""

        def read() -> dict[int, Start]:
            unread.clear()
            found = lineage.read_starts(root, unread=unread)
            passing = next((e for e in unread.values() if _passes(e)), None)
            if passing is not None:
                raise passing
            return found

        unread: dict[int, Exception] = {}
        try:
            starts = self.patiently(read)
        except OSError as error:
            if not _passes(error):
                raise
            starts = lineage.read_starts(root, unread=unread)
        for sequence, why in unread.items():
            name = f"{sequence:08d}/{lineage.START}"
            self.tell(f"{name} is not usable, its snapshots are left out: {why}")
            if isinstance(why, OSError):
                why.filename = str(root / name)
        return starts, next((e for e in unread.values() if _is_unreadable(e)), None)


def _passes(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in PASSING


def _is_unreadable(error: Exception) -> TypeGuard[_Unreadable]:
    """Whether all may be well with it: another node, user or program may read it."""
    return isinstance(error, NewerFormatError) or (
        isinstance(error, OSError) and error.errno in _UNREADABLE
    )


def _refusal(error: _Unreadable) -> Exception:
    """One of permission, or of the program's age, does not pass."""
    if isinstance(error, NewerFormatError):
        return error.refusal
    if error.errno not in _DENIED:
        return error
    return ConfigError(
        f"there are snapshots, and none can be read: {error.strerror}: {error.filename}. Let user"
        f" {os.geteuid()} read them (securityContext.runAsUser or fsGroup, as it was when they were"
        " written), or start anew in another snapshot directory or with snapshot.resume: Never"
    )


class _Opening:
    """One try of it."""

    def __init__(self, root: Path, identity: Identity, reader: _Reader) -> None:
        self._root = root
        self._identity = identity
        self._reader = reader
        self._unreadable: _Unreadable | None = None

    def run(self, resume: bool) -> tuple[Start, Loaded | None]:
        root, identity = self._root, self._identity
        patiently = self._reader.patiently
        lineage.refuse_if_stale(patiently(lambda: lineage.read_starts(root)), identity)
        try:
            sequence = patiently(lambda: lineage.claim(root))
        except PermissionError as error:
            raise _may_not_write(root, error) from None
        try:
            return self._begin(sequence, resume)
        except BaseException:
            self._withdraw(sequence)
            raise

    def _withdraw(self, sequence: int) -> None:
        """Leave nothing: copies of a whole snapshot, again at each try, would fill the disk."""
        where = lineage.directory(self._root, sequence)
        with contextlib.suppress(OSError):
            if not disk.exists(where / lineage.START):
                disk.remove_tree(where)

    def _begin(self, sequence: int, resume: bool) -> tuple[Start, Loaded | None]:
        root, identity = self._root, self._identity
        starts, self._unreadable = self._reader.starts(root)
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
        first = (identity.attempt, identity.round) <= (1, 0) or not identity.unique
        if loaded is None and self._unreadable is not None and (resume or not first):
            raise _refusal(self._unreadable)  # rather than start from nothing
        if loaded is None and not first:
            self._reader.tell(f"{root} holds no snapshot to go on from: training begins anew")
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
        try:
            listed = self._reader.patiently(lambda: manifest.listed(source))
        except disk.NotAFileError:
            return None  # since it was listed a stranger has put something else there
        except OSError as error:
            self._note(error, source.name)
            return None
        for path in reversed(listed):
            step = manifest.step_of(path)
            if step is None or (limit is not None and step > limit):
                continue
            try:
                brought = self._reader.patiently(partial(self._bring, path, ours))
            except NewerFormatError as error:
                name = f"{source.name}/{path.name}"
                self._reader.tell(f"snapshot {name} is not usable, and left as it is: {error}")
                self._unreadable = error
                continue
            except (InvalidSnapshotError, disk.NotAFileError) as problem:
                self._quarantine(path, problem)
                continue
            except OSError as error:
                # Not put aside: another node may be able to read it.
                self._note(error, f"{source.name}/{path.name}")
                continue
            temporary = ours / f"{path.name}.tmp"
            disk.write_new(temporary, [brought.manifest.encode()])
            disk.publish(temporary, ours / path.name)
            return Loaded(brought)
        return None

    def _bring(self, path: Path, ours: Path) -> Source:
        """Link the files of one into our directory, and check it there."""
        found = manifest.read(path)
        for file in found.files:
            try:
                manifest.opened(path.parent, file).close()
            except InvalidSnapshotError:
                if disk.exists(path):
                    raise
                raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(path)) from None
            with contextlib.suppress(FileExistsError):
                disk.link_or_copy(path.parent / file.name, ours / file.name)
        return self._reader.load(ours, found)

    def _note(self, error: OSError, name: str) -> None:
        """An older one is taken; if there is none, this is raised."""
        if error.errno not in _UNREADABLE:
            raise error
        self._reader.tell(f"snapshot {name} cannot be read: {error}")
        error.filename = str(self._root / name)
        self._unreadable = error

    def _quarantine(self, path: Path, problem: Exception) -> None:
        self._reader.tell(f"snapshot {path.parent.name}/{path.name} is not usable: {problem}")
        with contextlib.suppress(OSError):
            disk.set_aside(path)
