"""Change and open a snapshot's files: every such operation goes through here.

The volume may be shared with strangers. So nothing is opened but regular files in real
directories: no link is followed below the snapshot directory itself, nothing waits for a pipe and
no device is touched. ``seam`` is called before and after each change, so that tests can kill the
process, or fail the call, at every single point of a save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from ddpjob_trainer import failpoints

# --- Files ----------------------------------------------------------------------------------------

#: What O_DIRECT asks of lengths, offsets and addresses, at most, on the usual disks.
_BLOCK = 4096
#: So that a restart works on a disk that is full. Random: a file system may pack the rest.
RESERVE = "reserve"
_RESERVE_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC


class NotAFileError(OSError):
    """Something else lies where a regular file, or a directory, should be."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file in a real directory", str(path))


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
    """Write a new file durably, or leave none. Raises OSError: FileExistsError if there is one.

    ``past_cache``: where the file system can (O_DIRECT), do not go by way of the page cache.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _operation("create", path), _folder(path) as folder:
        fd = os.open(path.name, flags, 0o644, dir_fd=folder)
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
    except BaseException:
        with contextlib.suppress(OSError):
            remove(path)
        raise
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


# --- Reading ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Open the directory that holds a path; it is no link."""
    try:
        fd = os.open(path.parent, _READ | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise NotAFileError(path) from None
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. Raises OSError: NotAFileError for others."""
    with _folder(path) as folder:
        # Looked at first, for opening a device may do something already.
        if not stat.S_ISREG(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise NotAFileError(path)
        flags = _READ | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(path.name, flags, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # it has become another thing since
                raise NotAFileError(path) from None
            raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFileError(path)
    return cast("BinaryIO", os.fdopen(fd, "rb", buffering=0))


def read_bounded(path: Path, most: int) -> bytes:
    """Return a file's bytes, of a longer file the first ``most + 1``. Raises OSError."""
    with open_file(path) as file:
        size = min(os.fstat(file.fileno()).st_size, most) + 1
        return io.BufferedReader(file).read(size)  # type: ignore[type-var]


def exists(path: Path) -> bool:
    """Tell whether something of that name is there, be it a link to nowhere."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def names(directory: Path) -> list[str]:
    """Name what a directory holds. Raises OSError."""
    with _folder(directory / "any") as folder:
        return os.listdir(folder)  # noqa: PTH208 - relative to a descriptor


def directories(root: Path) -> list[str]:
    """Name the real directories below root. Raises OSError."""
    with os.scandir(root) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


# --- Names ------------------------------------------------------------------------------------


def commit(final: Path, content: bytes) -> None:
    """Write a small file whole or not at all, durably. Raises OSError."""
    temporary = final.with_name(f"{final.name}.tmp")
    write_new(temporary, [content])
    with _operation("rename", final), _folder(final) as folder:
        os.rename(temporary.name, final.name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_directory(final.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with _operation("fsync", path):
        fd = os.open(path, _READ | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_directories(path: Path) -> None:
    """Create a directory and those above it, durably. Raises OSError."""
    made = [one for one in (path, *path.parents) if not exists(one)]
    path.mkdir(parents=True, exist_ok=True)
    for one in reversed(made or [path]):  # one that a start made which was killed, perhaps
        with contextlib.suppress(PermissionError):  # above the volume it need not be readable
            sync_directory(one.parent)


def make_directory(path: Path) -> None:
    """Create a directory exclusively. Raises FileExistsError."""
    with _operation("mkdir", path):
        path.mkdir()


def link_or_copy(source: Path, target: Path) -> None:
    """Give a regular file a second name, else a durable copy. Raises OSError."""
    with open_file(source) as file, _folder(source) as there, _folder(target) as here:
        try:
            with _operation("link", target):
                os.link(
                    source.name, target.name,
                    src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False,
                )  # fmt: skip
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError:
            write_new(target, _pieces(file))


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    left = os.fstat(file.fileno()).st_size  # and no more, should it grow meanwhile
    while left and (piece := file.read(min(left, 1 << 20))):
        left -= len(piece)
        yield piece


def remove(path: Path) -> None:
    """Remove a file that may be gone already. Raises OSError."""
    with (
        _operation("unlink", path),
        contextlib.suppress(FileNotFoundError),
        _folder(path) as folder,
    ):
        os.unlink(path.name, dir_fd=folder)


def remove_tree(path: Path) -> None:
    """Remove a directory; what cannot be removed now is left for the next time."""
    with _operation("rmtree", path), contextlib.suppress(RecursionError):  # deep, made by strangers
        shutil.rmtree(path, ignore_errors=True)


# --- Room ---------------------------------------------------------------------------------------


def keep_reserve(root: Path) -> None:
    """Keep room for the next start: it writes some names and a record. Raises OSError."""
    if not exists(root / RESERVE):
        write_new(root / RESERVE, [os.urandom(_RESERVE_BYTES)])


def use_reserve(root: Path) -> bool:
    """Free that room; return whether there was any."""
    there = exists(root / RESERVE)
    remove(root / RESERVE)
    return there


# --- JSON of bounded size -------------------------------------------------------------------------
# Writing has the bounds of reading, so nothing is called durable that could never be read.

#: Some 100 000 ranks' parts fit in. Reading that much takes less than 1 GB.
MAX_JSON_BYTES = 64 << 20
_MAX_JSON_VALUES = 2 << 20


def dump_json(value: Any) -> bytes:
    """Return JSON that loads() takes. Raises ValueError when it is too large."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    check_json(data)
    return data


def load_json(data: bytes) -> Any:
    """Read JSON from a stranger. Raises ValueError."""
    check_json(data)
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def count(value: Any, least: int = 0) -> int:
    """Return a whole number that fits into 63 bits. Raises ValueError for anything else."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def check_json(data: bytes) -> None:
    """Raise ValueError for what would take too much memory to read.

    A list in brackets takes 3 bytes of text and 20 times as much in memory; a letter beyond ASCII
    makes all others as wide as itself.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(
            f"names and numbers take {len(data)} bytes, at most {MAX_JSON_BYTES} can be"
        )
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > _MAX_JSON_VALUES:
        raise ValueError(f"{values} names and numbers, at most {_MAX_JSON_VALUES} can be")
    if not data.isascii():
        raise ValueError("JSON that is not plain ASCII")


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a non-empty object with its checksum. Raises ValueError."""
    text = dump_json(body)
    digest = hashlib.sha256(text).hexdigest().encode()
    data = text[:-1] + b',"sha256":"' + digest + b'"}'
    check_json(data)
    return data


def unseal(data: bytes) -> Any:
    """Return what was sealed. Raises ValueError when a byte of it has changed."""
    check_json(data)
    end = data.rfind(b',"sha256":"')
    text = data[: max(end, 0)] + b"}"
    if data[end:] != f',"sha256":"{hashlib.sha256(text).hexdigest()}"}}'.encode():
        raise ValueError("it does not match its checksum")
    return load_json(text)
