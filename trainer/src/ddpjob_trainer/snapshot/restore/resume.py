"""Resume: choose a snapshot, bring it to this incarnation's directory, agree, publish.

manager.restore() calls resume() on all ranks at the same point. Rank 0 takes a directory, walks the
newest chain of start records, links each candidate's files into that directory and proposes it.
Each rank that sees the directory checks an equal number of the data files; if one cannot, all go on
to an older candidate. Then rank 0 publishes the manifest there, and its start record. What is read
later comes from the same ranks, piece by piece.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeGuard, TypeVar

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import (
    DataFile,
    InvalidSnapshotError,
    Manifest,
    NewerFormatError,
)
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.restore.load import FileSpan, Source
from ddpjob_trainer.telemetry.console import say

_PROPOSED = b"candidate "
_ATTEMPTS = 20
_FIRST_SECONDS = 0.25
_RETRY_SECONDS = 15.0
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_DENIED = (errno.EACCES, errno.EPERM)
_ROOM = (
    "a start writes a list of what it takes over, and where there are no hard links a copy. Free"
    " some space or enlarge the volume; all snapshots in it stay"
)
_CURES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "a start writes there too. Mount the volume for writing; all snapshots in it stay",
}

Result = TypeVar("Result")
_Unreadable = OSError | NewerFormatError


@dataclass(frozen=True, slots=True)
class Resumed:
    """An incarnation that all ranks have started.

    ``writers``: the ranks that see its directory. ``source``: the valid snapshot that it goes on
    from, None: from nothing.
    """

    start: Start
    writers: tuple[int, ...]
    source: Source | None


@dataclass(slots=True)
class Retry:
    """Ask again for a while where a disk fails for a moment. One deadline holds for all calls.

    A storage node that fails over answers EIO, ESTALE or ETIMEDOUT for some seconds. Taking an
    older snapshot at once would throw away training that is all there. ``now``: a monotonic clock.
    """

    rank: int
    now: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    _deadline: float = 0.0

    def __post_init__(self) -> None:
        self._deadline = self.now() + _RETRY_SECONDS

    def __call__(self, action: Callable[[], Result]) -> Result:
        """Return the action's result, or raise its last error after the deadline."""
        pause, told = _FIRST_SECONDS, set()
        while True:
            try:
                return action()
            except OSError as error:
                left = self._deadline - self.now()
                if error.errno not in _PASSING or left <= 0:
                    raise
                if error.errno not in told:
                    told.add(error.errno)
                    say(self.rank, f"{error}; trying again for {left:.0f} s")
            self.wait(min(pause, left))
            pause *= 2


def resume(root: Path, world: World, *, own_only: bool, retry: Retry | None = None) -> Resumed:
    """Start this incarnation on all ranks, from the newest snapshot that all can read.

    ``own_only``: only from what this job wrote itself. Raises OSError, PeerLostError, ConfigError.
    """
    if world.rank == 0:
        start, source = _open(root, world, own_only, retry or Retry(0))
        world.broadcast_bytes(json.dumps(asdict(start)).encode())
    else:
        start, source = _follow(root, world)
    return Resumed(start, _who(world, _sees(root, start)), source)


# --- Choose: rank 0 ---------------------------------------------------------------------------


def _open(root: Path, world: World, own_only: bool, retry: Retry) -> tuple[Start, Source | None]:
    opening = _Opening(root, world, retry)
    left = _ATTEMPTS
    while True:
        try:
            retry(lambda: root.mkdir(parents=True, exist_ok=True))
            return opening.run(own_only)
        except FileNotFoundError:  # a live zombie may remove what we are about to take
            left -= 1
            if not left:
                raise
        except OSError as error:
            raise _with_cure(root, error) from None


def _with_cure(root: Path, error: OSError) -> Exception:
    """Turn what trying again does not cure into ConfigError; say what frees a full disk."""
    if isinstance(error, FileExistsError | NotADirectoryError) and not root.is_dir():
        return ConfigError(
            f"no snapshot directory can be made at {root}: what lies there, or above, is no"
            " directory. Remove it, or choose another snapshot directory (snapshot.path)"
        )
    if isinstance(error, PermissionError):
        return ConfigError(
            f"user {os.geteuid()} cannot write to the snapshot directory {root}: {error.strerror}:"
            f" {error.filename}. Let that user write there (securityContext.runAsUser or fsGroup),"
            " or choose another snapshot directory (snapshot.path)"
        )
    if error.errno in _CURES:
        error.strerror = f"{error.strerror}: {_CURES[error.errno]}"
        error.filename = str(root)
    return error


class _Opening:
    """Rank 0's way from a claimed number to a start record."""

    def __init__(self, root: Path, world: World, retry: Retry) -> None:
        self._root = root
        self._folders = lineage.Disk(root)
        self._world = world
        self._retry = retry
        self._unreadable: _Unreadable | None = None
        self._identity = world.identity
        if not world.identity.unique:
            # torchrun and a bare python repeat their names, and no zombie can have this one.
            uid = f"{world.identity.uid}-{secrets.token_hex(8)}"
            self._identity = replace(world.identity, uid=uid)

    def run(self, own_only: bool) -> tuple[Start, Source | None]:
        """Claim a number and begin there; a start that fails leaves nothing."""
        self._unreadable = None
        sequence = self._retry(lambda: lineage.claim(self._root))
        try:
            return self._begin(sequence, own_only)
        except BaseException:
            # Copies of a whole snapshot, again at each try, would fill the disk.
            ours = lineage.directory(self._root, sequence)
            with contextlib.suppress(OSError):
                if not disk.exists(ours / lineage.START):
                    disk.remove_tree(ours)
            raise

    def _begin(self, sequence: int, own_only: bool) -> tuple[Start, Source | None]:
        identity, starts = self._identity, self._starts()
        lineage.refuse_if_stale(starts, identity)
        parent, source = 0, None
        head = lineage.newest(starts)
        # A job that resumes nothing continues, in its later attempts, what it began itself.
        if not own_only or (head is not None and head.uid == identity.uid):
            parent, source = self._choose(starts, sequence)
        first = (identity.attempt, identity.round) <= (1, 0) or not identity.unique
        if source is None and self._unreadable is not None and not (own_only and first):
            raise _refusal(self._unreadable)  # rather than start from nothing
        if source is None and not first:
            say(0, f"{self._root} holds no snapshot to go on from: training begins anew")
        start = Start(
            sequence,
            identity.uid,
            identity.attempt,
            identity.round,
            parent,
            source.step if source else -1,
            lineage.predecessors(starts, identity.uid),
        )
        lineage.write_start(self._root, start)
        return start, source

    def _starts(self) -> dict[int, Start]:
        """Read the start records, and keep why one of them cannot be read now."""
        unread: dict[int, Exception] = {}
        starts = self._retry(lambda: lineage.read_starts(self._folders, unread, self._retry))
        for number, why in unread.items():
            name = f"{number:08d}/{lineage.START}"
            say(0, f"{name} is not usable, its snapshots are left out: {why}")
            if isinstance(why, OSError):
                why.filename = str(self._root / name)
        self._unreadable = next((e for e in unread.values() if _is_unreadable(e)), None)
        return starts

    def _choose(self, starts: dict[int, Start], sequence: int) -> tuple[int, Source | None]:
        """Return the newest snapshot that all ranks can read, and whose it is."""
        for number, limit in lineage.chain(starts):
            for path in self._candidates(number, limit):
                source = self._take(path, lineage.directory(self._root, sequence))
                if source is not None:
                    return number, source
        return 0, None

    def _candidates(self, number: int, limit: int | None) -> Iterator[Path]:
        where = lineage.directory(self._root, number)
        try:
            steps = self._retry(lambda: lineage.steps(self._folders, number, limit))
        except disk.NotAFileError:
            return  # since it was listed a stranger has put something else there
        except OSError as error:
            self._note(error, where.name)
            return
        yield from (where / manifest.file_name(step) for step in reversed(steps))

    def _take(self, path: Path, ours: Path) -> Source | None:
        """Bring a candidate, and publish it as ours where all ranks agree."""
        name = f"{path.parent.name}/{path.name}"
        try:
            source = self._retry(lambda: self._bring(path, ours))
        except NewerFormatError as error:
            say(0, f"snapshot {name} is not usable, and left as it is: {error}")
            self._unreadable = error
        except (InvalidSnapshotError, disk.NotAFileError) as problem:
            say(0, f"snapshot {name} is not usable: {problem}")
            with contextlib.suppress(OSError):
                disk.set_aside(path)
        except OSError as error:
            self._note(error, name)  # not put aside: another node may be able to read it
        else:
            disk.commit(ours / path.name, source.manifest.encode())
            return source
        return None

    def _bring(self, path: Path, ours: Path) -> Source:
        """Link a candidate's files into our directory, and have all ranks check it there."""
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
        self._world.broadcast_bytes(_PROPOSED + ours.name.encode() + b" " + found.encode())
        return _check_together(ours, found, self._world)

    def _note(self, error: OSError, name: str) -> None:
        """Go on to an older one; if there is none, this error is raised."""
        if not _is_unreadable(error):
            raise error
        say(0, f"snapshot {name} cannot be read: {error}")
        error.filename = str(self._root / name)
        self._unreadable = error


def _is_unreadable(error: Exception) -> TypeGuard[_Unreadable]:
    """Tell whether another node, user or program may be able to read it."""
    return isinstance(error, NewerFormatError) or (
        isinstance(error, OSError) and error.errno in (*_PASSING, *_DENIED)
    )


def _refusal(error: _Unreadable) -> Exception:
    """Turn what does not pass, permission or the program's age, into ConfigError."""
    if isinstance(error, NewerFormatError):
        return error.refusal
    if error.errno not in _DENIED:
        return error
    return ConfigError(
        f"there are snapshots, and none can be read: {error.strerror}: {error.filename}. Let user"
        f" {os.geteuid()} read them (securityContext.runAsUser or fsGroup, as it was when they were"
        " written), or start anew in another snapshot directory or with snapshot.resume: Never"
    )


# --- Agree: all ranks -------------------------------------------------------------------------


def _follow(root: Path, world: World) -> tuple[Start, Source | None]:
    """Check what rank 0 proposes until it has started."""
    source: Source | None = None
    while (message := world.broadcast_bytes(None)).startswith(_PROPOSED):
        name, _, content = message.removeprefix(_PROPOSED).partition(b" ")
        found, source = manifest.decode(content), None
        with contextlib.suppress(InvalidSnapshotError, OSError):
            source = _check_together(root / name.decode(), found, world)
    return lineage.parse_start(json.loads(message)), source


def _sees(root: Path, start: Start) -> bool:
    try:
        return lineage.read_start(lineage.Disk(root), start.sequence) == start
    except (OSError, ValueError):
        return False


def _holds(path: Path) -> bool:
    try:
        return disk.exists(path)
    except OSError:  # the others read, and wait for this answer
        return False


def _who(world: World, yes: bool) -> tuple[int, ...]:
    """Return the ranks that say yes; rank 0 always does."""
    said = world.gather_bytes("the start of run.steps()", b"1" if yes or world.rank == 0 else b"0")
    return tuple(rank for rank, answer in enumerate(said) if answer == b"1")


def _check_together(where: Path, found: Manifest, world: World) -> Source:
    """Check an equal number of data files on each rank that sees them.

    Raises InvalidSnapshotError or OSError on all ranks when one of them meets it.
    """
    # The names hold a number that was drawn: a file of that name is the same file.
    readers = _who(world, not found.files or _holds(where / found.files[0].name))
    owners = {f.name: readers[n % len(readers)] for n, f in enumerate(found.files)}
    offsets: dict[str, load.Offsets] = {}
    problem: Exception | None = None

    def fetch(file: DataFile, spans: Sequence[FileSpan], buffer: torch.Tensor) -> None:
        # Source.read calls it: one rank reads, all get the bytes.
        owner = owners[file.name]
        if owner == world.rank:
            read = load.read_spans
            Retry(world.rank)(lambda: read(where, file, offsets[file.name], spans, buffer))
        world.broadcast_tensor(buffer, owner)

    source, chunks = Source(found, fetch), load.by_file(found)
    try:
        _ = source.outline
        for file in found.files:
            if owners[file.name] == world.rank:
                offsets[file.name] = load.verify_file(where, found, file, chunks[file.name])
    except (InvalidSnapshotError, OSError) as error:
        problem = error
    invalid = isinstance(problem, InvalidSnapshotError)
    failed, damaged = world.sum([float(problem is not None), float(invalid)])
    if problem is not None and world.rank != 0:
        say(world.rank, f"cannot read the snapshot of step {found.step}: {problem}")
    if not failed:
        return source
    if world.rank == 0 and problem is None and damaged:
        # Perhaps it is damaged only as seen from there: rank 0 looks for itself.
        load.open_source(where, found)
    raise problem or OSError(errno.EIO, "another rank cannot read it")
