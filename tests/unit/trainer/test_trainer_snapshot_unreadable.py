"""A disk that does not give a snapshot back: the older one counts, and nothing is put aside."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.restore import resume
from ddpjob_trainer.state.codec import flatten
from support.snapshots import Clock, open_snapshots


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    def make(words: str, code: int) -> None:
        opened = disk.open_file

        def fails(path: Path) -> BinaryIO:
            if words in path.name:
                raise OSError(code, os.strerror(code))
            return opened(path)

        monkeypatch.setattr(disk, "open_file", fails)

    return make


def save(root: Path, *steps: int) -> None:
    store, _ = open_snapshots(root, 1)
    for step in steps:
        store.save(step, flatten({"n": step, "w": torch.ones(3)}), {})


def step_of(root: Path, clock: Clock | None = None) -> int:
    loaded = open_snapshots(root, 2, clock=clock)[1]
    assert loaded is not None
    return loaded.step


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_what_the_disk_does_not_give_back_gives_way_to_the_older(  # type: ignore[no-untyped-def]
    tmp_path, unreadable, capsys, code
):
    save(tmp_path, 5, 10)
    unreadable("-000000000010-", code)
    assert step_of(tmp_path) == 5
    assert f"cannot be read: [Errno {code}]" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*.invalid"))  # another node may be able to read it


@pytest.mark.parametrize(
    ("words", "code"),
    [("-000000000010-", errno.EIO), ("000000000010.json", errno.ESTALE),
     ("start.json", errno.ETIMEDOUT)],
)  # fmt: skip
def test_a_disk_that_fails_for_a_moment_costs_no_step(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch, capsys, words, code
):
    save(tmp_path, 5, 10)
    opened, clock = disk.open_file, Clock()

    def fails(path: Path) -> BinaryIO:
        if words in path.name and path.parent.name == "00000001" and clock.now < 4:
            raise OSError(code, os.strerror(code))
        return opened(path)

    monkeypatch.setattr(disk, "open_file", fails)
    assert step_of(tmp_path, clock) == 10
    assert capsys.readouterr().err.count("trying again for 15 s") == 1
    assert clock.pauses == [0.25, 0.5, 1.0, 2.0, 4.0]


def test_it_is_waited_for_so_long_in_all_and_no_longer(tmp_path, unreadable):  # type: ignore[no-untyped-def]
    save(tmp_path, 5, 10, 15)
    unreadable("-00000000001", errno.EIO)  # 10 and 15
    clock = Clock()
    assert step_of(tmp_path, clock) == 5
    assert clock.now == 15


@pytest.mark.parametrize("words", ["start.json", "-00000000000"])
def test_when_nothing_can_be_read_training_does_not_start_anew(tmp_path, unreadable, words):  # type: ignore[no-untyped-def]
    save(tmp_path, 5)
    unreadable(words, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        open_snapshots(tmp_path, 2)
    assert open_snapshots(tmp_path, 1, uid="new", resume=False)[1] is None  # asked for


@pytest.mark.parametrize("words", ["start.json", ".safetensors", "step-"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_what_this_user_may_not_read_is_named_with_the_cure(tmp_path, unreadable, words, code):  # type: ignore[no-untyped-def]
    save(tmp_path, 5)
    unreadable(words, code)
    with pytest.raises(ConfigError, match="there are snapshots, and none can be read") as found:
        open_snapshots(tmp_path, 2)
    assert str(tmp_path / "00000001") in str(found.value)
    assert "runAsUser or fsGroup" in str(found.value)


class Second:
    """The world as rank 1 of 2 sees it, where rank 0 does what is asked of it."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def gather_bytes(self, what: str, answer: bytes) -> list[bytes]:
        self.said.append(answer)
        return [b"1", answer]

    def sum(self, numbers: list[float]) -> list[float]:
        return numbers


def test_a_rank_that_may_not_look_leaves_the_reading_to_others(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    save(tmp_path, 1)
    path = tmp_path / "00000001" / manifest.file_name(1)
    found = manifest.read(path)
    monkeypatch.setattr(disk, "exists", _closed)
    world: Any = Second()
    resume._check_together(path.parent, found, world)
    assert world.said == [b"0"]


def _closed(path: Path) -> bool:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))
