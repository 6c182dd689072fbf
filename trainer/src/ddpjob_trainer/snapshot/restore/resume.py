"""Resume: choose a snapshot, bring it to this incarnation's directory, agree, publish.

manager.restore() calls resume() on all ranks at the same point. Rank 0 takes a directory, walks the
newest chain of start records, links each candidate's files into that directory and proposes it.
Each rank that sees the directory checks an equal number of the data files. What one rank cannot
read another one tries: if that one can, the first is sick and ends; else all go on to an older
candidate. Nothing is renamed or removed. Then rank 0 publishes the manifest there, and its start
record. What is read later comes from the same ranks, piece by piece.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeGuard, TypeVar

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.errors import ConfigError, PeerLostError, cannot_read
from ddpjob_trainer.printing import say
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

_LIST, _LOOK, _PROPOSED, _SICK = b"list ", b"look ", b"candidate ", b"sick "
_CALL = "the start of run.steps()"
_NAMED = 3  # of the files that failed
_RECORD = -1  # in place of a step: the start record
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
        pause, logged = _FIRST_SECONDS, set()
        while True:
            try:
                return action()
            except OSError as error:
                left = self._deadline - self.now()
                if error.errno not in _PASSING or left <= 0:
                    raise
                if error.errno not in logged:
                    logged.add(error.errno)
                    say(self.rank, f"{error}; trying again for {left:.0f} s")
            self.wait(min(pause, left))
            pause *= 2


def resume(
    root: Path, world: World, settings: SnapshotSettings, retry: Retry | None = None
) -> Resumed:
    """Start this incarnation on all ranks, from the newest snapshot that can be read.

    Raises OSError, PeerLostError, ConfigError; HardwareError on a rank that alone cannot read it.
    """
    if world.rank == 0:
        start, source = _open(root, world, settings, retry or Retry(0))
        world.broadcast_bytes(json.dumps(asdict(start)).encode())
    else:
        start, source = _follow(root, world)
    return Resumed(start, _who(world, _sees(root, start)), source)


# --- Choose: rank 0 ---------------------------------------------------------------------------


def _open(
    root: Path, world: World, settings: SnapshotSettings, retry: Retry
) -> tuple[Start, Source | None]:
    opening = _Opening(root, world, settings, retry)
    left = _ATTEMPTS
    while True:
        try:
            retry(lambda: disk.make_directories(root))
            return opening.run()
        except FileNotFoundError:  # a live zombie may remove what we are about to take
            left -= 1
            if not left:
                raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not disk.use_reserve(root):
                raise _with_cure(root, error) from None
            say(0, f"{root} is full: this start takes the room of {disk.RESERVE}")


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
    """Rank 0's way from a claimed number to a start record.

    ``_known``: what says that there has been a snapshot. ``_failed``: why one is not usable.
    """

    def __init__(self, root: Path, world: World, settings: SnapshotSettings, retry: Retry) -> None:
        self._root = root
        self._folders = lineage.Disk(root)
        self._world = world
        self._settings = settings
        self._retry = retry
        self._ours = 0  # the number claimed
        self._unreadable: _Unreadable | None = None
        self._known: list[str] = []
        self._failed: list[str] = []
        self._anothers = ""  # why snapshots of another namespace's job are left alone
        self._identity = world.identity
        if not world.identity.unique:
            # torchrun and a bare python repeat their names, and no zombie can have this one.
            uid = f"{world.identity.uid}-{secrets.token_hex(8)}"
            self._identity = replace(world.identity, uid=uid)

    def run(self) -> tuple[Start, Source | None]:
        """Claim a number and begin there; a start that fails leaves nothing."""
        self._unreadable, self._known, self._failed, self._anothers = None, [], [], ""
        self._ours = self._retry(lambda: lineage.claim(self._root))
        try:
            return self._begin()
        except BaseException:
            # Copies of a whole snapshot, again at each try, would fill the disk.
            ours = lineage.directory(self._root, self._ours)
            with contextlib.suppress(OSError):
                if not disk.exists(ours / lineage.START):
                    disk.remove_tree(ours)
            raise

    def _begin(self) -> tuple[Start, Source | None]:
        identity, starts = self._identity, self._starts()
        lineage.refuse_if_stale(starts, identity)
        first = (identity.attempt, identity.round) <= (1, 0) or not identity.unique
        parent, source = 0, None
        for head in lineage.heads(starts, identity.uid):
            # A job that resumes nothing continues, in its later attempts, what it began itself.
            if not self._settings.resume and head.uid != identity.uid:
                break
            parent, source = self._choose(starts, head)
            if source is not None or (self._known and not self._anothers):
                break  # a chain without any snapshot hides none of an earlier job
        if source is None and self._anothers:
            raise ConfigError(self._anothers)
        if source is None and (self._settings.resume or not first):
            self._refuse_to_start_over(starts)
        if source is None and not first:
            say(0, f"{self._root} holds no snapshot to go on from: training starts over")
        if source is not None and source.step < self._settings.known_step:
            say(
                0,
                f"warning: there was a snapshot of step {self._settings.known_step}, and the newest"
                f" usable one is of step {source.step}: the steps between are trained again",
            )
        start = Start(
            self._ours,
            identity.uid,
            identity.attempt,
            identity.round,
            parent,
            source.step if source else -1,
            lineage.predecessors(starts, identity.uid),
        )
        lineage.write_start(self._root, start, identity.secret)
        return start, source

    def _refuse_to_start_over(self, starts: dict[int, Start]) -> None:
        """Raise where something says that there has been a snapshot: only a user may give it up."""
        if self._unreadable is not None:
            raise _refusal(self._unreadable)
        if (step := self._settings.known_step) > 0:
            self._known.insert(0, f"the job's status says that there was one of step {step}")
        if self._settings.resume:
            numbers = [n for n in self._folders.numbers() if n not in starts]
            for number in numbers:  # its record is gone, or damaged
                where = lineage.directory(self._root, number)
                with contextlib.suppress(OSError):
                    for path in manifest.listed(where)[-1:]:
                        with contextlib.suppress(InvalidSnapshotError):  # a stranger's, perhaps
                            step = manifest.read(path).step
                            self._known.append(f"{number:08d} holds one of step {step}")
        if self._known:
            failed = "; ".join(self._failed[:_NAMED])
            why = f" What failed: {failed}." if failed else ""
            raise ConfigError(
                f"no snapshot in {self._root} is usable, and there was one, so training does not"
                f" start over: {'; '.join(self._known[:_NAMED])}.{why} Put the files back, or mount"
                " the volume that has them. To start over, delete the job and apply it with"
                " snapshot.resume: Never, or in another directory"
            )

    def _starts(self) -> dict[int, Start]:
        """Read the start records, and keep why one of them cannot be read now."""
        unread: dict[int, Exception] = {}
        starts = self._retry(
            lambda: lineage.read_starts(self._folders, unread, self._retry, self._identity)
        )
        for number, why in unread.items():
            name = f"{number:08d}/{lineage.START}"
            if not (isinstance(why, NewerFormatError | lineage.ForgedError) or _is_denied(why)):
                answers = self._ask(_LOOK, number, _RECORD)
                if b"1" in answers:
                    self._end_sick(OnlyHereError(0, f"{name}: {why}", answers.index(b"1")))
            say(0, f"{name} is not usable, its snapshots are left out: {why}")
            self._failed.append(f"{name}: {why}")
            if isinstance(why, OSError):
                why.filename = str(self._root / name)
        if foreign := lineage.foreign(self._root):
            say(0, f"{self._root} holds {len(foreign)} foreign entries, such as {foreign[0]}")
        self._unreadable = next((e for e in unread.values() if _is_unreadable(e)), None)
        return starts

    def _choose(self, starts: dict[int, Start], head: Start) -> tuple[int, Source | None]:
        """Return the newest snapshot of a chain that can be read, and whose it is."""
        for number, limit in lineage.chain(starts, head):
            ours, found = lineage.directory(self._root, self._ours), 0
            for path, listed in self._candidates(number, limit):
                found += 1
                source = self._take(path, ours, listed=listed)
                if source is not None:
                    return number, source
            if found:
                self._known.append(f"{number:08d} holds {found}")
            begun = starts[number].parent_step
            if begun >= 0:
                self._known.append(f"{number:08d} went on from one of step {begun}")
        return 0, None

    def _candidates(self, number: int, limit: int | None) -> Iterator[tuple[Path, bool]]:
        """Yield the manifests that any rank sees, newest first: one's list may be out of date."""
        where = lineage.directory(self._root, number)
        try:
            steps = self._retry(lambda: lineage.steps(self._folders, number, limit))
        except disk.NotAFileError:
            return  # since it was listed a stranger has put something else there
        except OSError as error:
            self._note(error, where.name)
            steps = []
        others = {step for one in self._ask(_LIST, number) if one for step in json.loads(one)}
        seen = {step for step in others if limit is None or step <= limit}
        for step in sorted({*steps, *seen}, reverse=True):
            yield where / manifest.file_name(step), step in steps

    def _ask(self, what: bytes, *numbers: int) -> list[bytes]:
        """Return what each rank answers, b"" where it does not see our directory."""
        self._world.broadcast_bytes(what + json.dumps([self._ours, *numbers]).encode())
        return self._world.gather_bytes(_CALL, b"")

    def _take(self, path: Path, ours: Path, *, listed: bool) -> Source | None:
        """Bring a candidate, and publish it as ours where all ranks agree.

        ``listed``: this rank sees it. If it is gone then, newer ones may have come meanwhile.
        """
        name = f"{path.parent.name}/{path.name}"
        try:
            found = self._retry(lambda: self._find(path))
            if self._is_anothers(found):
                return None
            source = self._retry(lambda: self._bring(path, ours, found))
        except NewerFormatError as error:
            say(0, f"snapshot {name} is not usable, and left as it is: {error}")
            self._unreadable = error
        except (InvalidSnapshotError, disk.NotAFileError) as problem:
            say(0, f"snapshot {name} is not usable: {problem}")
            self._failed.append(f"{name}: {problem}")
        except OnlyHereError as error:
            self._end_sick(error)
        except FileNotFoundError:
            if listed:
                raise
        except OSError as error:
            self._note(error, name)
        else:
            disk.link_or_copy(path, ours / path.name)
            disk.sync_directory(ours)
            return source
        return None

    def _end_sick(self, error: OnlyHereError) -> NoReturn:
        """End the rank that cannot read, and with it this start, on all ranks."""
        self._world.broadcast_bytes(_SICK + json.dumps([error.rank, error.text]).encode())
        raise _sick(error.rank, error.text, 0)

    def _find(self, path: Path) -> Manifest:
        """Read a manifest and look at its files. Where that fails here, the others try."""
        try:
            return _look(path)
        except NewerFormatError:
            raise
        except (InvalidSnapshotError, OSError) as error:
            if not _is_denied(error):
                step = manifest.step_of(path.name)
                answers = self._ask(_LOOK, int(path.parent.name), step or 0)
                if b"1" in answers:
                    name = f"{path.parent.name}/{path.name}"
                    raise OnlyHereError(0, f"{name}: {error}", answers.index(b"1")) from None
            raise

    def _bring(self, path: Path, ours: Path, found: Manifest) -> Source:
        """Link a candidate's files into our directory, and have all ranks check it there."""
        for file in found.files:
            with contextlib.suppress(FileExistsError):
                disk.link_or_copy(path.parent / file.name, ours / file.name)
        self._world.broadcast_bytes(_PROPOSED + ours.name.encode() + b" " + found.encode())
        return _check_together(ours, found, self._world)

    def _is_anothers(self, found: Manifest) -> bool:
        """Tell whether a job of another namespace made it; only a user may go on from that."""
        theirs, mine = found.config.get("namespace"), self._identity.namespace
        if not theirs or not mine or theirs == mine or "namespace" in self._settings.allow_changes:
            return False
        self._anothers = (
            f"the snapshots in {self._root} are of a job in namespace {theirs!r}, and this one is"
            f" in {mine!r}. Give this job its own directory: another snapshot.path, another"
            " volume, or subPath. To go on from them, use"
            " snapshots=ddp.Snapshots(allow_changes='namespace')"
        )
        return True

    def _note(self, error: OSError, name: str) -> None:
        """Go on to an older one; if there is none, this error is raised."""
        if not _is_unreadable(error):
            raise error
        say(0, f"snapshot {name} cannot be read: {error}")
        self._failed.append(f"{name}: {error}")
        error.filename = str(self._root / name)
        self._unreadable = error


class OnlyHereError(OSError):
    """One rank cannot read what another can. Tried again for a while: its cache may be old."""

    def __init__(self, rank: int, text: str, able: int) -> None:
        super().__init__(errno.ESTALE, f"{text}, which rank {able} can read")
        self.rank = rank
        self.text = str(self.strerror)


def _sick(rank: int, text: str, mine: int) -> Exception:
    """Build the error of this rank where one alone cannot read a snapshot."""
    if rank != mine:
        return PeerLostError(f"rank {rank} cannot read the snapshots that others can")
    return cannot_read(rank, text)


def _look(path: Path) -> Manifest:
    """Read a manifest whose data files are there in their sizes. Raises as manifest.opened()."""
    found = manifest.read(path)
    for file in found.files:
        try:
            manifest.opened(path.parent, file).close()
        except InvalidSnapshotError:
            if disk.exists(path):
                raise
            raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(path)) from None
    return found


def _is_denied(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _DENIED


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
        " written), or start over in another snapshot directory or with snapshot.resume: Never"
    )


# --- Agree: all ranks -------------------------------------------------------------------------


def _follow(root: Path, world: World) -> tuple[Start, Source | None]:
    """Do what rank 0 asks for, until it has started."""
    source: Source | None = None
    while True:
        order = world.broadcast_bytes(None)
        if order.startswith((_LIST, _LOOK)):
            world.gather_bytes(_CALL, _answer(root, order))
        elif order.startswith(_SICK):
            rank, text = json.loads(order.removeprefix(_SICK))
            raise _sick(rank, text, world.rank)
        elif order.startswith(_PROPOSED):
            name, _, content = order.removeprefix(_PROPOSED).partition(b" ")
            found, source = manifest.decode(content), None
            with contextlib.suppress(InvalidSnapshotError, OSError):
                source = _check_together(root / name.decode(), found, world)
        else:
            return lineage.parse_start(json.loads(order)), source


def _answer(root: Path, question: bytes) -> bytes:
    """Return which steps this rank lists in a directory, or whether it can read a manifest there.

    b"": it does not see the directory that rank 0 has made, so its disk is another one.
    """
    ours, number, *step = json.loads(question.partition(b" ")[2])
    with contextlib.suppress(InvalidSnapshotError, OSError, ValueError):
        if _holds(lineage.directory(root, ours)):
            if not step:
                return json.dumps(lineage.steps(lineage.Disk(root), number, None)).encode()
            if step == [_RECORD]:
                return b"1" if lineage.read_start(lineage.Disk(root), number) else b""
            _look(lineage.directory(root, number) / manifest.file_name(*step))
            return b"1"
    return b""


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
    said = world.gather_bytes(_CALL, b"1" if yes or world.rank == 0 else b"0")
    return tuple(rank for rank, answer in enumerate(said) if answer == b"1")


def _read_again(world: World, action: Callable[[], None]) -> None:
    """Read what this rank has checked; the others wait for it."""
    try:
        Retry(world.rank)(action)
    except (InvalidSnapshotError, OSError) as error:
        if world.size == 1:
            raise
        why = f"{error}, which it could read before"
        raise _sick(world.rank, why, world.rank) from None


def _check_together(where: Path, found: Manifest, world: World) -> Source:
    """Check an equal number of data files on each rank that sees them.

    A file that its reader cannot read goes to the next reader. Raises on all ranks alike:
    OnlyHereError where that one can, else InvalidSnapshotError or OSError.
    """
    # The names hold a number that was drawn: a file of that name is the same file.
    readers = _who(world, not found.files or _holds(where / found.files[0].name))
    owners = {f.name: readers[n % len(readers)] for n, f in enumerate(found.files)}
    offsets: dict[str, load.Offsets] = {}

    def fetch(file: DataFile, spans: Sequence[FileSpan], buffer: torch.Tensor) -> None:
        # Source.read calls it: one rank reads, all get the bytes.
        owner = owners[file.name]
        if owner == world.rank:
            read = load.read_spans
            _read_again(world, lambda: read(where, file, offsets[file.name], spans, buffer))
        world.broadcast_tensor(buffer, owner)

    def check(names: Collection[str]) -> dict[str, tuple[int, str]]:
        """Return errno and text of those that this rank cannot read."""
        failed = {}
        for file in found.files:
            if file.name in names:
                try:
                    offsets[file.name] = load.verify_file(where, found, file, chunks[file.name])
                except (InvalidSnapshotError, OSError) as error:
                    say(world.rank, f"cannot read the snapshot of step {found.step}: {error}")
                    failed[file.name] = (getattr(error, "errno", None) or 0, str(error))
        return failed

    def together(owned: Mapping[str, int]) -> dict[str, tuple[int, str]]:
        mine = check([name for name, rank in owned.items() if rank == world.rank])
        said = world.gather_bytes(_CALL, json.dumps(mine).encode())
        return {name: why for one in said for name, why in json.loads(one).items()}

    source, chunks = Source(found, fetch), load.by_file(found)
    _ = source.outline
    failed = together(owners)
    others = {name: readers[(readers.index(owners[name]) + 1) % len(readers)] for name in failed}
    again = together(others) if len(readers) > 1 and failed else failed
    for name, (code, text) in failed.items():
        if name in again:
            raise OSError(code, text, name) if code else InvalidSnapshotError(text)
        if code not in _DENIED:
            raise OnlyHereError(owners[name], text, others[name])
    owners |= others
    return source
