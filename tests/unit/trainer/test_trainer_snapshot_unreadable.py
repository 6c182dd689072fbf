"""A disk that does not give a snapshot back: the older one counts, and nothing is put aside."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from ddpjob_trainer.snapshot.ondisk import disk
from ddpjob_trainer.state.codec import flatten
from support.snapshots import open_snapshots


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    def make(words: str, code: int) -> None:
        opened = disk.open_data

        def fails(path: Path) -> BinaryIO:
            if words in path.name:
                raise OSError(code, os.strerror(code))
            return opened(path)

        monkeypatch.setattr(disk, "open_data", fails)

    return make


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM])
def test_what_the_disk_does_not_give_back_gives_way_to_the_older(  # type: ignore[no-untyped-def]
    tmp_path, unreadable, monkeypatch, capsys, code
):
    store, _ = open_snapshots(tmp_path, 1)
    store.save(5, flatten({"n": 5, "w": torch.ones(3)}), {})
    store.save(10, flatten({"n": 10, "w": torch.ones(3)}), {})
    unreadable("-000000000010-", code)
    loaded = open_snapshots(tmp_path, 2)[1]
    assert loaded is not None
    assert loaded.step == 5
    assert f"cannot be read: [Errno {code}]" in capsys.readouterr().out
    assert not list(tmp_path.glob("*/*.invalid"))  # another node may be able to read it


def test_when_nothing_can_be_read_training_does_not_start_anew(tmp_path, unreadable):  # type: ignore[no-untyped-def]
    store, _ = open_snapshots(tmp_path, 1)
    store.save(5, flatten({"n": 5, "w": torch.ones(3)}), {})
    unreadable("-00000000000", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        open_snapshots(tmp_path, 2)
