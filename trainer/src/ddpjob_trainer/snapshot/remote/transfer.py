"""Copy snapshots and evidence between a disk and an object store. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpjob_contract.evidence import EVIDENCE_DIR
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.evidence import folder
from ddpjob_trainer.evidence.folder import MAX_ROUNDS, MOST_FILE, RoundFolder
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.disk import MAX_JSON_BYTES
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import (
    DataFile,
    InvalidSnapshotError,
    Manifest,
    NewerFormatError,
)
from ddpjob_trainer.snapshot.remote.store import Store, file_system, listed

# --- Upload ---------------------------------------------------------------------------------------
# Called by remote/process.py. A store has no exclusive creation and no hard links, so an
# incarnation draws a number above all that it has seen and copies its parent snapshot there
# before its start record; the records make the same chains as on a disk (ondisk/lineage.py). What
# is being copied is pinned by hard links, so that the disk's retention cannot take it away,
# however slow the store is.

_PINS = "uploading"
_DRAWN = 10**6
_MOST = 10**14  # see store.py


class Uploader:
    """One incarnation's side of the uploads. Everything may be tried again after an error."""

    def __init__(
        self, store: Store, root: Path, sequence: int, keep: int, secret: str = ""
    ) -> None:
        self._store = store
        self._root = root
        self._directory = lineage.directory(root, sequence)
        self._pins = self._directory / _PINS
        self._start = lineage.read_start(lineage.Disk(root), sequence)
        self._keep = keep
        self._secret = secret
        start = self._start
        self._identity = Identity(start.uid, start.attempt, start.round, unique=True, secret=secret)
        self._number = 0  # ours in the store, once drawn
        self._begun = False
        self.newest = -1

    def upload(self, step: int) -> None:
        """Copy a step's snapshot, unless a newer one is there. Do so again if it was marked since.

        Raises PeerLostError when this incarnation is out of date, InvalidSnapshotError, OSError,
        and what the protocol's library raises.
        """
        if not self._begun:
            self._begin(step)
        if step >= self.newest:
            self._copy(step)
            self.newest = step
            self._retain()

    def _begin(self, step: int) -> None:
        """Copy the parent, then write the start record: no other's retention can hurt it then."""
        known, _ = self._store.starts(self._identity)
        start = self._start
        lineage.refuse_if_stale(known, self._identity)
        self._number = self._number or draw(self._store.numbers())
        if start.parent_step >= 0:
            first = self._directory / manifest.file_name(start.parent_step)
            self.newest = start.parent_step if disk.exists(first) else step
            self._copy(self.newest)
        earlier = (*start.predecessors, *lineage.predecessors(known, start.uid))
        record = replace(
            start,
            sequence=self._number,
            parent_sequence=self._parent(known),
            predecessors=lineage.newest_uids(earlier, start.uid),
        )
        for name, content in lineage.records(record, self._secret):
            self._store.write(self._number, name, content)
        self._begun = True

    def _parent(self, known: dict[int, Start]) -> int:
        """Return our parent's number if it wrote here too. 0: its copy is all we have."""
        with contextlib.suppress(OSError, ValueError):
            on_disk = lineage.Disk(self._root)
            parent = lineage.read_start(on_disk, self._start.parent_sequence)
            whose = (parent.uid, parent.attempt, parent.round)
            return next((n for n, s in known.items() if (s.uid, s.attempt, s.round) == whose), 0)
        return 0

    def _copy(self, step: int) -> None:
        path = self._directory / manifest.file_name(step)
        found = manifest.read(path)
        self._pin(found)
        store, number = self._store, self._number
        for file in found.files:
            if store.size(number, file.name) != file.bytes:
                store.put(self._pins / file.name, number, file.name)
                if store.size(number, file.name) != file.bytes:
                    raise OSError(f"{store.url}: {file.name} did not arrive whole")
        store.write(number, path.name, found.encode())
        self._unpin()

    def _pin(self, found: Manifest) -> None:
        with contextlib.suppress(FileExistsError):
            disk.make_directory(self._pins)
        self._unpin({file.name for file in found.files})
        for file in found.files:
            pin = self._pins / file.name
            if disk.exists(pin) and pin.lstat().st_size != file.bytes:  # a copy that was killed
                disk.remove(pin)
            with contextlib.suppress(FileExistsError):
                disk.link_or_copy(self._directory / file.name, pin)

    def _unpin(self, needed: frozenset[str] | set[str] = frozenset()) -> None:
        for name in disk.names(self._pins):
            if name not in needed:
                disk.remove(self._pins / name)

    # --- Retention -------------------------------------------------------------------------

    def _retain(self) -> None:
        """Keep the newest of ours and what our chain needs. The rest goes, the manifest first."""
        store, number = self._store, self._number
        _trim(store, number, self._keep)
        unread: dict[int, Exception] = {}
        known, taken = lineage.read_starts(store, unread, reader=self._identity), store.numbers()
        mine = known.get(number)
        if mine is None or lineage.newest(known) != mine:
            raise PeerLostError("a later incarnation uploads to the same place")
        spared = lineage.last_of_others(store, known, number)
        for old in lineage.unneeded(
            known, taken, number, self._keep, partial(lineage.steps, store), unread
        ):
            if old in spared:
                _trim(store, old, 2)
            else:
                store.remove_folder(old)


def _trim(store: Store, number: int, keep: int) -> None:
    """Keep the newest snapshots of a folder."""
    steps = lineage.steps(store, number, None)
    needed: set[str] = set()
    for step in steps[-keep:]:
        needed |= {file.name for file in read(store, number, step).files}
    for step in steps[:-keep]:
        with contextlib.suppress(InvalidSnapshotError):
            names = {file.name for file in read(store, number, step).files}
            store.remove(number, manifest.file_name(step))
            for name in names - needed:
                store.remove(number, name)


def read(store: Store, number: int, step: int) -> Manifest:
    """Read a manifest. Raises InvalidSnapshotError, FileNotFoundError."""
    return manifest.decode(store.read(number, manifest.file_name(step), MAX_JSON_BYTES), step)


def draw(taken: list[int]) -> int:
    """Return a number above all others, that nobody draws at the same time."""
    highest = max((n for n in taken if n < _MOST - 2 * _DRAWN), default=0)
    return (highest // _DRAWN + 1) * _DRAWN + secrets.randbelow(_DRAWN)


# --- Fetch ----------------------------------------------------------------------------------------
# Called by remote/process.py. It becomes an incarnation on disk under the name that it has in the
# store, and resume.py then finds and checks it like any other.

Tell = Callable[[str], None]
_NAMED = 3  # of what failed


def fetch(
    store: Store,
    root: Path,
    identity: Identity,
    *,
    resume: bool,
    tell: Tell,
    alive: Callable[[], None] = lambda: None,
) -> int | None:
    """Bring the newest snapshot and return its step, None if nothing newer is there.

    ``alive`` is called as bytes come. Raises PeerLostError when a later incarnation has uploaded
    already, ConfigError when only a newer program can read what is there, OSError, and what the
    protocol's library raises.
    """
    known, newer = store.starts(identity)
    if identity.unique:
        lineage.refuse_if_stale(known, identity)
    if foreign := store.foreign():
        tell(f"{store.url} holds {len(foreign)} foreign folders, such as {foreign[0]}")
    heads = [h for h in lineage.heads(known, identity.uid) if resume or h.uid == identity.uid]
    if not (heads or resume):
        return None
    disk.make_directories(root)
    on_disk = lineage.Disk(root)
    starts = lineage.read_starts(on_disk)
    local = next(iter(lineage.heads(starts, identity.uid)), None)
    held = any(lineage.steps(on_disk, *one) for one in lineage.chain(starts, local))
    if held and not (heads and _is_newer(heads[0], local)):
        return None
    failed, last = list[str](), None
    for head, number, step in _candidates(store, known, heads):
        if failed and head != last:
            break  # only a chain without any snapshot hides none of an earlier job
        last = head
        try:
            _bring(store, root, number, step, head, identity, alive)
        except (InvalidSnapshotError, FileNotFoundError) as error:
            tell(f"{store.url}: the snapshot of step {step} is passed over: {error}")
            failed.append(f"step {step}: {error}")
            newer += [error] if isinstance(error, NewerFormatError) else []
        else:
            return step
    if newer:
        raise newer[0].refusal  # rather than start from nothing
    if resume and not failed:
        failed = _without_a_record(store, known)
    if failed and not held:
        raise ConfigError(
            f"no snapshot in {store.url} is usable, and there was one, so training does not start"
            f" over: {'; '.join(failed[:_NAMED])}. Put the objects back. To start over, delete the"
            " job and apply it with snapshot.resume: Never, or upload to another place"
        )
    return None


def _candidates(
    store: Store, known: dict[int, Start], heads: list[Start]
) -> Iterator[tuple[Start, int, int]]:
    """Yield head, number and step of all that may be brought, the best first."""
    for head in heads:
        for number, limit in lineage.chain(known, head):
            for step in reversed(lineage.steps(store, number, limit)):
                yield head, number, step


def _without_a_record(store: Store, known: dict[int, Start]) -> list[str]:
    found = ((n, lineage.steps(store, n, None)) for n in store.numbers() if n not in known)
    return [f"folder {n} has no valid {lineage.START}, and step {s[-1]}" for n, s in found if s]


def _is_newer(remote: Start, local: Start | None) -> bool:
    """Tell whether the disk's newest incarnation came before that of the store.

    Where neither knows of the other the disk, which is written first, is right.
    """
    if local is None:
        return True
    if local.uid == remote.uid:
        return (remote.attempt, remote.round) > (local.attempt, local.round)
    return local.uid in remote.predecessors


def _bring(
    store: Store,
    root: Path,
    number: int,
    step: int,
    head: Start,
    identity: Identity,
    alive: Callable[[], None],
) -> None:
    found = read(store, number, step)
    _check_room(store, root, number, found)
    sequence = lineage.claim(root)
    where = lineage.directory(root, sequence)
    try:
        for file in found.files:
            disk.write_new(where / file.name, _checked(store, number, file, alive))
        disk.commit(where / manifest.file_name(step), found.encode())
        # In the name of the newest incarnation: what follows it is newer than that.
        start = replace(head, sequence=sequence, parent_sequence=0, parent_step=-1)
        lineage.write_start(root, start, identity.secret)
    except BaseException:
        disk.remove_tree(where)
        raise


def _check_room(store: Store, root: Path, number: int, found: Manifest) -> None:
    """Check sizes before anything is fetched: a manifest may claim terabytes."""
    for file in found.files:
        size = store.size(number, file.name)
        if size != file.bytes:
            raise InvalidSnapshotError(f"{file.name} has {size} bytes instead of {file.bytes}")
    room = os.statvfs(root)
    free, needed = room.f_bavail * room.f_frsize, sum(file.bytes for file in found.files)
    if needed > free:
        text = f"the snapshot takes {needed} bytes, and there is room for {free}"
        raise OSError(errno.ENOSPC, text, str(root))


def _checked(
    store: Store, number: int, file: DataFile, alive: Callable[[], None]
) -> Iterator[bytes]:
    crc, size = 0, 0
    for piece in store.pieces(number, file.name):
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if size > file.bytes:
            break
        alive()
        yield piece
    if size != file.bytes or crc != file.crc32:
        raise InvalidSnapshotError(f"{file.name} does not match its checksum")


# --- Evidence of failures -------------------------------------------------------------------------
# process.py copies after each snapshot, and at a launcher's end; cli.py fetches. Everything is
# tried once: what the store does not take now it may get with the next snapshot.

_OURS = re.compile(r"replica-[0-9]{1,6}\.json|rank-[0-9]{1,7}\.nccl\.gz")
_MOST_FETCHED = 20_000  # files


class EvidenceCopy:
    """Copies from a snapshot directory to a URL. ``names``: only these files, None: all."""

    def __init__(self, url: str, root: Path, names: frozenset[str] | None = None) -> None:
        self._root = root
        self._names = names
        self._fs, base = file_system(url)
        self._base = posixpath.join(base, EVIDENCE_DIR)
        self._copied: dict[str, tuple[int, int]] = {}  # size and mtime of what is there

    def copy(self) -> None:
        """Copy what is new; raises OSError, and what the protocol's library raises."""
        found = [seen.folder for seen in folder.find(self._root)[:MAX_ROUNDS]]
        for at in found:
            self._copy(at)
        if found:
            self._prune(max(found, key=lambda at: (at.attempt, at.round)))

    def _copy(self, at: RoundFolder) -> None:
        there = _sizes(self._fs, posixpath.join(self._base, at.name))
        with folder.opened(self._root, at.name) as fd:
            for name in os.listdir(fd):  # noqa: PTH208 - relative to a descriptor
                if not _OURS.fullmatch(name) or (self._names and name not in self._names):
                    continue
                path = posixpath.join(self._base, at.name, name)
                seen = os.stat(name, dir_fd=fd, follow_symlinks=False)
                known = self._copied.get(path, (there.get(name), seen.st_mtime_ns))
                if known != (seen.st_size, seen.st_mtime_ns):
                    with contextlib.suppress(ValueError):  # a stranger's
                        data = folder.read(fd, name, MOST_FILE)
                        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                        self._fs.pipe_file(path, data)
                self._copied[path] = (seen.st_size, seen.st_mtime_ns)

    def _prune(self, own: RoundFolder) -> None:
        """Remove the oldest rounds of this job, never one after its newest here."""
        mine = sorted(
            (at.attempt, at.round, at.name)
            for at in map(folder.parsed, listed(self._fs, self._base))
            if at is not None and at.job == own.job
        )
        for attempt, round_, name in mine[:-MAX_ROUNDS]:
            if (attempt, round_) < (own.attempt, own.round):
                self._fs.rm(posixpath.join(self._base, name), recursive=True)


@contextlib.contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Bring the evidence at a URL to a directory that goes at the end."""
    fs, base = file_system(url)
    base = posixpath.join(base, EVIDENCE_DIR)
    with tempfile.TemporaryDirectory(prefix="ddpjob-evidence-") as made:
        left = _MOST_FETCHED
        for at in filter(None, map(folder.parsed, listed(fs, base))):
            for name, size in _sizes(fs, posixpath.join(base, at.name)).items():
                if left and _OURS.fullmatch(name) and size <= MOST_FILE:
                    left -= 1
                    data = fs.cat_file(posixpath.join(base, at.name, name))
                    with folder.opened(Path(made), at.name, make=True) as fd:
                        folder.write(fd, name, data)
        yield Path(made)


def _sizes(fs: Any, path: str) -> dict[str, int]:
    fs.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
        found = fs.ls(path, detail=True)
        return {posixpath.basename(str(one["name"])): int(one.get("size") or 0) for one in found}
    return {}
