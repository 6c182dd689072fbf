"""Durable file operations. Every change of the disk that a snapshot makes goes through here.

``seam`` is called before and after each of them, so that tests can kill the process, or fail
the call, at every single point of a save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ddpjob_trainer import failpoints

#: What O_DIRECT asks of lengths, offsets and addresses, at most, on the usual disks.
_BLOCK = 4096

Seam = Callable[[str, Path], None]
seam: Seam | None = None


@contextlib.contextmanager
def _operation(name: str, path: Path) -> Iterator[None]:
    failpoints.reach("snapshot")
    if seam is not None:
        seam(f"before {name}", path)
    yield
    failpoints.reach("snapshot")
    if seam is not None:
        seam(f"after {name}", path)


def write_new(
    path: Path, chunks: Iterable[bytes | memoryview], *, past_cache: bool = False
) -> None:
    """Write a file that must not exist yet, and make its content durable.

    ``past_cache``: where the file system can (O_DIRECT), do not go by way of the page cache.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _operation("create", path):
        fd = os.open(path, flags, 0o644)
    try:
        if past_cache:
            with contextlib.suppress(OSError):  # EINVAL: this file system cannot
                _set_direct(fd, True)
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            with _operation("write", path):
                while view:
                    view = view[_write(fd, view) :]
        with _operation("fsync", path):
            os.fsync(fd)
    finally:
        os.close(fd)


def _set_direct(fd: int, on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def _write(fd: int, view: memoryview) -> int:
    """Write some of it. Past the page cache only whole blocks from aligned memory are taken."""
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return os.write(fd, view)
    whole = len(view) - len(view) % _BLOCK
    if whole:
        try:
            return os.write(fd, view[:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    _set_direct(fd, False)  # the end of the file; or it wants another alignment
    return os.write(fd, view)


def open_data(path: Path) -> BinaryIO:
    """Open a data file for reading, unbuffered; a symbolic link is refused. Raises OSError."""
    # Not blocking, for it may turn out to be a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return cast("BinaryIO", os.fdopen(fd, "rb", buffering=0))


def read_bounded(path: Path, most: int) -> bytes:
    """Return a file's bytes, of a longer file the first ``most + 1``. Raises OSError."""
    with path.open("rb") as file:
        return file.read(most + 1)


def publish(temporary: Path, final: Path) -> None:
    """Give a durable file its final name, durably: the commit point."""
    with _operation("rename", final):
        temporary.rename(final)
    sync_directory(final.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with _operation("fsync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory exclusively. Raises FileExistsError."""
    with _operation("mkdir", path):
        path.mkdir()


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file; a durable copy where the file system has no hard links."""
    try:
        with _operation("link", target):
            os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        write_new(target, _pieces(source))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    with _operation("unlink", path):
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory; what cannot be removed now is left for the next time."""
    with _operation("rmtree", path):
        shutil.rmtree(path, ignore_errors=True)
