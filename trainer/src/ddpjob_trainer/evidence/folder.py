"""Write, list and remove the folders of evidence, one for each round of each job.

writer.py and incidents.py call it. The volume may be shared with strangers: no link below the
snapshot directory is followed, nothing but regular files is opened, and what has another name than
ours stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddpjob_contract.evidence import EVIDENCE_DIR

#: The newest rounds, of all jobs that had this directory, and the bytes of all of them.
MAX_ROUNDS: Final = 20
MAX_BYTES: Final = 64 << 20

_NAME: Final = re.compile("attempt-([0-9]{1,10})-round-([0-9]{1,10})-([0-9a-f]{8})")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Place:
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

    place: Place
    modified: int  # ns, by the file system's clock
    size: int


def place(uid: str, attempt: int, round_: int) -> Place:
    """Return a round's place."""
    return Place(attempt, round_, hashlib.sha256(uid.encode()).hexdigest()[:8])


def parsed(name: str) -> Place | None:
    """Return the place that a folder's name tells, None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    return Place(int(match[1]), int(match[2]), match[3]) if match else None


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


def read(folder: int, name: str, most: int) -> bytes:
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
    return sorted(found, key=lambda one: (one.modified, one.place.attempt, one.place.round))[::-1]


def _seen(fd: int, at: Place) -> Seen:
    inner = os.open(at.name, _FOLDER, dir_fd=fd)
    try:
        files = os.listdir(inner)  # noqa: PTH208 - relative to a descriptor
        sizes = [os.stat(one, dir_fd=inner, follow_symlinks=False).st_size for one in files]
        return Seen(at, os.fstat(inner).st_mtime_ns, sum(sizes))
    finally:
        os.close(inner)


def prune(root: Path, own: Place, since: int) -> None:
    """Remove the oldest folders beyond the bounds. Raises OSError.

    Never one in which a later incarnation may write: of this job only earlier rounds than ``own``,
    of another only those that nobody has changed since this launcher began (``since``).
    """
    kept, size = 0, 0
    for seen in find(root):
        at = seen.place
        kept, size = kept + 1, size + seen.size
        if kept <= MAX_ROUNDS and size <= MAX_BYTES:
            continue
        earlier = (at.attempt, at.round) < (own.attempt, own.round)
        if earlier if at.job == own.job else seen.modified < since:
            with opened(root) as fd:
                shutil.rmtree(at.name, ignore_errors=True, dir_fd=fd)
            kept, size = kept - 1, size - seen.size
