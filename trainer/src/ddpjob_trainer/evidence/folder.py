"""Keep the evidence of each round in a folder: cut to bounds, written by a thread, removed by age.

The launcher's reports/evidence puts files here and goes on, so that a disk that hangs or is full
holds up nobody. Only the newest content of a file is kept, and only of a few files: what such a
disk does not take is dropped. The volume may be shared with strangers: no link below the snapshot
directory is followed, nothing but regular files is opened, and what has another name than ours
stays.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from ddpjob_contract.evidence import EVIDENCE_DIR, End, Evidence

# --- Bounds: a round of any gang has some megabytes at most ---------------------------------------

#: Bytes of a rank's last lines, in JSON: of one that failed, and of others as many as there are.
MOST_LOG: Final = 32 << 10
_LEAST_LOG: Final = 2 << 10
_LOGS_OF_ROUND: Final = 8 << 20
_LOGS_OF_FILE: Final = 256 << 10
MOST_STACKS: Final = 64 << 10
MOST_FILE: Final = 1 << 20
#: Bytes of the copies of NCCL's flight recorder: of a rank, and of all.
_MOST_FLIGHT: Final = 1 << 20
_FLIGHT_OF_ROUND: Final = 32 << 20


def log_share(world_size: int, nproc: int) -> int:
    """Return the bytes of log that a rank may keep that did not fail."""
    return max(_LEAST_LOG, min(MOST_LOG, _LOGS_OF_ROUND // world_size, _LOGS_OF_FILE // nproc))


def flight_share(world_size: int) -> int:
    """Return the bytes of flight recorder, compressed, that a rank may keep."""
    return min(_MOST_FLIGHT, _FLIGHT_OF_ROUND // world_size)


def newest_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the last lines that fit into so many bytes of JSON."""
    kept: list[str] = []
    for line in reversed(lines):
        most -= len(json.dumps(line)) + 1
        if most < 0:
            break
        kept.append(line)
    return kept[::-1]


def encode(body: Evidence) -> bytes:
    """Encode a file; drop logs of ranks that did not fail, then all, should it be too large."""
    for kept in (get_args(End), ("failed",), ()):
        ranks = [
            one if one["end"] in kept else {k: v for k, v in one.items() if k != "log"}
            for one in body["ranks"]
        ]
        data = json.dumps({**body, "ranks": ranks}, separators=(",", ":")).encode()
        if len(data) <= MOST_FILE:
            break
    return data


# --- Folders, one for each round of each job ------------------------------------------------------

#: The newest rounds, of all jobs that had this directory, and the bytes of all of them.
MAX_ROUNDS: Final = 20
MAX_BYTES: Final = 64 << 20

_NAME: Final = re.compile("attempt-([0-9]{1,10})-round-([0-9]{1,10})-([0-9a-f]{8})")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RoundFolder:
    """The folder of one round. ``job``: a digest of the uid, since two jobs may have had a name."""

    attempt: int
    round: int
    job: str

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return f"attempt-{self.attempt}-round-{self.round}-{self.job}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A folder as it was found."""

    folder: RoundFolder
    modified: int  # ns, by the file system's clock
    size: int


def round_folder(uid: str, attempt: int, round_: int) -> RoundFolder:
    """Return a round's folder."""
    return RoundFolder(attempt, round_, hashlib.sha256(uid.encode()).hexdigest()[:8])


def parsed(name: str) -> RoundFolder | None:
    """Parse a folder's name; return None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    return RoundFolder(int(match[1]), int(match[2]), match[3]) if match else None


@contextlib.contextmanager
def opened(root: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open the folder of evidence, or one in it. Raises OSError."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in (EVIDENCE_DIR, *names):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            inner = os.open(name, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def write(folder: int, name: str, content: bytes) -> None:
    """Write or replace a file, whole or not at all. Raises OSError."""
    temporary = f".{name}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):  # of a launcher that was killed
        os.unlink(temporary, dir_fd=folder)
    fd = os.open(temporary, flags, 0o644, dir_fd=folder)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(fd)


def read(folder: int | None, name: str, most: int) -> bytes:
    """Return a regular file's bytes. Raises OSError, ValueError for a larger one."""
    if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise ValueError("not a regular file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data


def find(root: Path) -> list[Seen]:
    """List all folders of rounds, the newest first. Raises OSError."""
    found = []
    with opened(root) as fd:
        for name in os.listdir(fd):  # noqa: PTH208 - relative to a descriptor
            with contextlib.suppress(OSError):
                if at := parsed(name):
                    found.append(_seen(fd, at))
    return sorted(found, key=lambda one: (one.modified, one.folder.attempt, one.folder.round))[::-1]


def _seen(fd: int, at: RoundFolder) -> Seen:
    inner = os.open(at.name, _FOLDER, dir_fd=fd)
    try:
        files = os.listdir(inner)  # noqa: PTH208 - relative to a descriptor
        sizes = [os.stat(one, dir_fd=inner, follow_symlinks=False).st_size for one in files]
        return Seen(at, os.fstat(inner).st_mtime_ns, sum(sizes))
    finally:
        os.close(inner)


def prune(root: Path, own: RoundFolder, since: int) -> None:
    """Remove the oldest folders beyond the bounds. Raises OSError.

    Never one in which a later incarnation may write: of this job only earlier rounds than ``own``,
    of another only those that nobody has changed since this launcher began (``since``).
    """
    kept, size = 0, 0
    for seen in find(root):
        at = seen.folder
        kept, size = kept + 1, size + seen.size
        if kept <= MAX_ROUNDS and size <= MAX_BYTES:
            continue
        earlier = (at.attempt, at.round) < (own.attempt, own.round)
        if earlier if at.job == own.job else seen.modified < since:
            with opened(root) as fd:
                shutil.rmtree(at.name, ignore_errors=True, dir_fd=fd)
            kept, size = kept - 1, size - seen.size


# --- The thread that writes -----------------------------------------------------------------------

_MOST_WAITING: Final = 4
#: Of a flight recorder's dump, before it is compressed.
_MOST_SOURCE: Final = 32 << 20
#: A write that takes longer is not waited for at the end.
_SLOW_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Flight:
    """A dump of NCCL's flight recorder, and the bytes that its copy may have."""

    rank: int
    source: Path
    most: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One file to write. ``prunes``: then remove what is beyond the bounds."""

    folder: RoundFolder
    name: str
    body: Evidence
    prunes: bool = False
    flights: tuple[Flight, ...] = ()


class Writer:
    """Owns the thread, which begins with the first entry. ``say`` gets why it cannot write."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self._root, self._say = root, say
        self._waiting: dict[tuple[str, str], Entry] = {}
        self._changed = threading.Condition()
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None
        self._said = ""
        self._since: int | None = None  # when this launcher first wrote here, by the disk's clock

    def put(self, entry: Entry) -> None:
        """Have a file written; never blocks."""
        with self._changed:
            key = (entry.folder.name, entry.name)
            self._waiting.pop(key, None)
            self._waiting[key] = entry
            while len(self._waiting) > _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evidence", daemon=True)
                self._thread.start()

    def flush(self, seconds: float) -> None:
        """Wait until all is written, not for a disk that has been slow already."""
        with self._changed:
            if self._busy_since and time.monotonic() - self._busy_since > _SLOW_SECONDS:
                return
            self._changed.wait_for(lambda: not self._waiting and not self._busy_since, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                entry = self._waiting.pop(next(iter(self._waiting)))
                self._busy_since = time.monotonic()
            try:
                self._write(entry)
            except OSError as error:
                self._refused(error)
            finally:
                with self._changed:
                    self._busy_since = None
                    self._changed.notify_all()

    def _write(self, entry: Entry) -> None:
        body = entry.body.copy()
        with opened(self._root, entry.folder.name, make=True) as fd:
            if entry.flights:
                body["flight"] = [_copied(fd, one) for one in entry.flights]
            write(fd, entry.name, encode(body))
            if self._since is None:
                self._since = os.fstat(fd).st_mtime_ns
        if entry.prunes:
            prune(self._root, entry.folder, self._since)

    def _refused(self, error: OSError) -> None:
        """Say once, for each reason, that nothing is kept."""
        reason = error.strerror or str(error)
        if reason != self._said:
            self._said = reason
            where = self._root / EVIDENCE_DIR
            self._say(f"last lines and stacks are not kept in {where}: {reason}")


def flight_name(rank: int) -> str:
    """Return the name of a dump's copy."""
    return f"rank-{rank}.nccl.gz"


def _copied(fd: int, flight: Flight) -> str:
    """Copy a dump, compressed; return the copy's name, or why there is none."""
    name = flight_name(flight.rank)
    with contextlib.suppress(OSError, ValueError):
        dump = read(None, str(flight.source), _MOST_SOURCE)
        data = gzip.compress(dump, compresslevel=6, mtime=0)
        if len(data) > flight.most:
            return f"rank {flight.rank}: {flight.source} has {len(data)} bytes even compressed"
        write(fd, name, data)
        return name
    return f"rank {flight.rank}: {flight.source} was not readable"
