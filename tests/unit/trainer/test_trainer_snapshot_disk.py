"""Writing past the page cache: the same bytes, also where a file system cannot."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpjob_trainer.snapshot.ondisk import disk, files

BLOCK = 4096


def aligned(size: int) -> memoryview:
    """Bytes in pages of their own, as the staging buffers are."""
    shared = mmap.mmap(-1, max(size, 1))
    content = memoryview(shared)[:size]
    content[:] = os.urandom(size)
    return content


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def writes(monkeypatch) -> list[tuple[bool, int]]:  # type: ignore[no-untyped-def]
    """For each write whether it went past the cache, and its length."""
    seen: list[tuple[bool, int]] = []
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        seen.append((is_direct(fd), len(data)))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    return seen


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path, writes, size):  # type: ignore[no-untyped-def]
    content = aligned(size)
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    whole = size - size % BLOCK
    assert writes == [(True, whole)] * (whole > 0) + [(False, size % BLOCK)] * (size % BLOCK > 0)


def refuses(fd: int, data: memoryview, write: Any) -> int:
    """As a file system that takes the flag and not the write."""
    if is_direct(fd):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return int(write(fd, data))


def is_short(fd: int, data: memoryview, write: Any) -> int:
    return int(write(fd, data[:512] if is_direct(fd) else data))


@pytest.mark.parametrize("odd", [refuses, is_short, None], ids=["refused", "short", "not aligned"])
def test_what_cannot_go_past_the_cache_goes_through_it(tmp_path, monkeypatch, odd):  # type: ignore[no-untyped-def]
    if odd is not None:
        monkeypatch.setattr(os, "write", partial(odd, write=os.write))
    content = aligned(4 * BLOCK + 3)[0 if odd else 3 :]
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)


def test_a_full_disk_is_told_and_not_tried_again(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        disk.write_new(tmp_path / "file", [aligned(2 * BLOCK)], past_cache=True)


def test_a_file_system_that_cannot(tmp_path, monkeypatch, writes):  # type: ignore[no-untyped-def]
    real = fcntl.fcntl

    def cannot(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", cannot)
    content = aligned(2 * BLOCK)
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    assert writes == [(False, 2 * BLOCK)]


def test_only_large_parts_go_past_the_cache(tmp_path: Path, monkeypatch, writes):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(files, "_PAST_CACHE_BYTES", 3 * BLOCK)
    writer = files.SnapshotFiles(tmp_path, 1, "n", 2)
    writer.directory.mkdir(parents=True)
    for blocks in (2, 3):
        writer.write(f"part-{blocks}", aligned(blocks * BLOCK))
    assert writes == [(False, 2 * BLOCK), (True, 3 * BLOCK)]
