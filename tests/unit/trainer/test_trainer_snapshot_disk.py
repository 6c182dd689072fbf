"""Writing past the page cache: the same bytes, also where a file system cannot."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpjob_trainer.snapshot.ondisk import disk, files

BLOCK = 4096
Writes = list[tuple[bool, int]]


def aligned(size: int) -> memoryview:
    """Bytes in pages of their own, as the staging buffers are."""
    content = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    content[:] = os.urandom(size)
    return content


def error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Writes]:
    """Of each write, on a file system that is so: whether past the cache, and its length."""

    def on(kind: str) -> Writes:
        seen: Writes = []
        write, control = os.write, fcntl.fcntl

        def wrote(fd: int, data: memoryview) -> int:
            direct = bool(control(fd, fcntl.F_GETFL) & os.O_DIRECT)
            seen.append((direct, len(data)))
            if kind == "full" or (kind == "refuses the write" and direct):
                raise error(errno.ENOSPC if kind == "full" else errno.EINVAL)
            return write(fd, data[:512] if kind == "short" and direct else data)

        def set_flag(fd: int, command: int, argument: int = 0) -> int:
            if kind == "refuses the flag" and command == fcntl.F_SETFL and argument & os.O_DIRECT:
                raise error(errno.EINVAL)
            return control(fd, command, argument)

        monkeypatch.setattr(os, "write", wrote)
        monkeypatch.setattr(fcntl, "fcntl", set_flag)
        return seen

    return on


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path, writes, size):  # type: ignore[no-untyped-def]
    content, seen = aligned(size), writes("usual")
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    whole = size - size % BLOCK
    assert seen == [(True, whole)] * (whole > 0) + [(False, size % BLOCK)] * (size % BLOCK > 0)


@pytest.mark.parametrize("kind", ["refuses the write", "refuses the flag", "short", "not aligned"])
def test_what_cannot_go_past_the_cache_goes_through_it(tmp_path, writes, kind):  # type: ignore[no-untyped-def]
    content, seen = aligned(4 * BLOCK + 3)[3 if kind == "not aligned" else 0 :], writes(kind)
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    assert kind != "refuses the flag" or not any(direct for direct, _ in seen)


def test_a_full_disk_is_told_and_not_tried_again(tmp_path, writes):  # type: ignore[no-untyped-def]
    seen = writes("full")
    with pytest.raises(OSError, match="No space left"):
        disk.write_new(tmp_path / "file", [aligned(2 * BLOCK)], past_cache=True)
    assert len(seen) == 1
    assert not list(tmp_path.iterdir())


def test_only_large_parts_go_past_the_cache(tmp_path: Path, monkeypatch, writes):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(files, "PAST_CACHE_BYTES", 3 * BLOCK)
    writer, seen = files.SnapshotFiles(tmp_path, 1, "n", 2), writes("usual")
    writer.directory.mkdir(parents=True)
    for blocks in (2, 3):
        writer.write(f"part-{blocks}", aligned(blocks * BLOCK))
    assert seen == [(False, 2 * BLOCK), (True, 3 * BLOCK)]
