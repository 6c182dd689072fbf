"""A start beside others, after a newer program, on a bad disk; a reader beside retention."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot import commands
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import seal, unseal
from ddpjob_trainer.snapshot.reader import SnapshotToolError, read_snapshot
from ddpjob_trainer.snapshot.remote.fetch import fetch
from ddpjob_trainer.snapshot.remote.store import Store as Remote
from ddpjob_trainer.snapshot.remote.upload import Uploader
from ddpjob_trainer.snapshot.restore import resume
from ddpjob_trainer.state.codec import flatten
from support.snapshots import Clock, Store, open_snapshots


def save(store: Store, *steps: int) -> None:
    for step in steps:
        state = {"model": {"w": torch.full((30,), float(step))}, "n": step}
        store.save(step, flatten(state), {"seed": 1})


def saved(root: Path, *steps: int, **options: Any) -> Path:
    save(open_snapshots(root, 1, **options)[0], *steps)
    return root


def step_of(found: tuple[Store, Any]) -> int | None:
    return None if found[1] is None else int(found[1].step)


def make_newer(path: Path) -> None:
    more = {"more": 1} if path.name == lineage.START else {"version": manifest.VERSION + 1}
    path.write_bytes(seal(unseal(path.read_bytes()) | more))


@pytest.mark.parametrize("name", [manifest.file_name(5), lineage.START])
def test_what_a_newer_program_wrote_is_neither_put_aside_nor_forgotten(tmp_path, name):  # type: ignore[no-untyped-def]
    """After a rollback of the image: else training began anew, and the next upgrade as well."""
    path = saved(tmp_path, 5) / "00000001" / name
    before = path.read_bytes()
    make_newer(path)
    with pytest.raises(ConfigError, match=r"none can be read: .* newer ddpjob-trainer; use that"):
        open_snapshots(tmp_path, 2)
    with pytest.raises(ConfigError):
        open_snapshots(tmp_path, 1, uid="another")
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    path.write_bytes(before)  # with the newer program all is there
    assert step_of(open_snapshots(tmp_path, 2)) == 5
    make_newer(path)
    assert step_of(open_snapshots(tmp_path, 1, uid="never", resume=False)) is None


def test_where_an_older_one_can_be_read_it_is_taken_and_the_newer_stays(tmp_path, capsys):  # type: ignore[no-untyped-def]
    make_newer(saved(tmp_path, 5, 6) / "00000001" / manifest.file_name(6))
    assert step_of(open_snapshots(tmp_path, 2)) == 5
    words = "000000000006.json is not usable, and left as it is: format version 3"
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*.invalid"))


@pytest.mark.parametrize("name", [manifest.file_name(5), lineage.START])
def test_nor_does_a_fresh_disk_begin_anew_where_a_store_has_it(tmp_path, name):  # type: ignore[no-untyped-def]
    url = f"file://{tmp_path}/store"
    local, _ = open_snapshots(tmp_path / "a", 1)
    save(local, 5)
    Uploader(Remote(url), tmp_path / "a", local.sequence, 2).upload(5)
    (path,) = (tmp_path / "store").glob(f"*/{name}")
    make_newer(path)
    new = Identity("new", 1, 0, unique=True)
    assert fetch(Remote(url), tmp_path / "b", new, resume=False, tell=print) is None
    with pytest.raises(ConfigError, match="newer ddpjob-trainer"):
        fetch(Remote(url), tmp_path / "b", new, resume=True, tell=print)


def test_two_that_began_in_one_moment_do_not_go_on_from_each_others(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """Neither has seen the other: by its number alone the second's snapshots are the newest."""
    first = open_snapshots(tmp_path, 1, uid="a")[0]
    with monkeypatch.context() as patch:
        patch.setattr(lineage, "read_starts", lambda *_, **__: {})
        second = open_snapshots(tmp_path, 1, uid="b")[0]
    save(first, 5)
    save(second, 3)
    for attempt in (2, 3):
        assert step_of(open_snapshots(tmp_path, attempt, uid="a")) == 5
        assert step_of(open_snapshots(tmp_path, attempt, uid="b")) == 3


def test_an_attempt_that_finds_nothing_to_go_on_from_says_so(tmp_path, capsys):  # type: ignore[no-untyped-def]
    """The volume is another one than before, or somebody has emptied it."""
    open_snapshots(tmp_path, 1)
    assert "begins anew" not in capsys.readouterr().err
    open_snapshots(tmp_path, 2)
    assert f"{tmp_path} holds no snapshot to go on from" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "link to nowhere", "below a file"])
def test_what_is_no_directory_is_named_with_the_cure(tmp_path, kind):  # type: ignore[no-untyped-def]
    root = tmp_path / "job"
    if kind == "link to nowhere":
        root.symlink_to(tmp_path / "nowhere")
    else:
        root.touch()
    with pytest.raises(ConfigError, match=f"made at {root}.* is no directory. Remove it, or"):
        open_snapshots(root / "more" if kind == "below a file" else root)


@pytest.mark.parametrize("name", ["mkdir", "make_directory"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_what_this_user_may_not_write_is_named_with_the_cure(tmp_path, monkeypatch, name, code):  # type: ignore[no-untyped-def]
    def refuses(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    saved(tmp_path, 5)
    monkeypatch.setattr(*((Path, name) if name == "mkdir" else (disk, name)), refuses)
    with pytest.raises(ConfigError, match=r"cannot write to .*runAsUser or fsGroup"):
        open_snapshots(tmp_path, 2)


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", cannot)


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.ENOSPC, "No space left.*Free some space or enlarge the volume; all snapshots"),
        (errno.EDQUOT, "quota exceeded.*Free some space"),
        (errno.EROFS, "Read-only file system.*Mount the volume for writing; all snapshots"),
    ],
)
def test_a_disk_that_takes_no_start_is_named_with_the_cure(tmp_path, monkeypatch, code, cure):  # type: ignore[no-untyped-def]
    """Nothing is left of it: else each try would leave less room for the next."""

    def full(operation: str, path: Path) -> None:
        if operation == "before write" and path.name.endswith("-2.safetensors"):
            raise OSError(code, os.strerror(code))  # which knows no path

    saved(tmp_path, 5)
    monkeypatch.setattr(disk, "seam", full)
    for attempt in (2, 3):
        with pytest.raises(OSError, match=f"{cure}.*{tmp_path}'$") as found:
            open_snapshots(tmp_path, attempt)
        assert found.value.errno == code
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    monkeypatch.undo()
    assert step_of(open_snapshots(tmp_path, 4)) == 5


@pytest.mark.usefixtures("no_links")
def test_restarts_without_progress_do_not_fill_a_disk_without_hard_links(tmp_path):  # type: ignore[no-untyped-def]
    """Each has copied the same snapshot. Their records stay: the chain goes on to older ones."""
    saved(tmp_path, 4, 5)
    for attempt in range(2, 12):
        assert step_of(open_snapshots(tmp_path, attempt, keep=3)) == 5
    assert len(list(tmp_path.glob("*/step-*05.json"))) == 3
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 3 * 3 + 3
    for path in tmp_path.glob("*/step-*05.json"):
        path.write_bytes(b"damaged")
    assert step_of(open_snapshots(tmp_path, 12, keep=3)) == 4


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def make(words: str, code: int, clock: Clock | None = None) -> None:
        opened = disk.open_file

        def fails(path: Path) -> BinaryIO:
            if words in path.name and (clock is None or clock.now < 4):
                raise OSError(code, os.strerror(code))
            return opened(path)

        monkeypatch.setattr(disk, "open_file", fails)

    return make


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_what_the_disk_does_not_give_back_gives_way_to_the_older(
    tmp_path, unreadable, capsys, code
):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5, 10)
    unreadable("-000000000010-", code)
    assert step_of(open_snapshots(tmp_path, 2)) == 5
    assert f"cannot be read: [Errno {code}]" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*.invalid"))  # another node may be able to read it


@pytest.mark.parametrize("words", ["-000000000010-", "000000000010.json", "start.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_disk_that_fails_for_a_moment_costs_no_step(tmp_path, unreadable, capsys, words, code):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5, 10)
    clock = Clock()
    unreadable(words, code, clock)
    assert step_of(open_snapshots(tmp_path, 2, clock=clock)) == 10
    assert capsys.readouterr().err.count("trying again for 15 s") == 1
    assert clock.pauses == [0.25, 0.5, 1.0, 2.0, 4.0]


def test_it_is_waited_for_so_long_in_all_and_no_longer(tmp_path, unreadable):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5, 10, 15)
    unreadable("-00000000001", errno.EIO)  # 10 and 15
    clock = Clock()
    assert step_of(open_snapshots(tmp_path, 2, clock=clock)) == 5
    assert clock.now == 15


@pytest.mark.parametrize("words", ["start.json", "-00000000000"])
def test_when_nothing_can_be_read_training_does_not_start_anew(tmp_path, unreadable, words):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5)
    unreadable(words, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        open_snapshots(tmp_path, 2)
    assert open_snapshots(tmp_path, 1, uid="new", resume=False)[1] is None  # asked for


@pytest.mark.parametrize("words", ["start.json", ".safetensors", "step-"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_what_this_user_may_not_read_is_named_with_the_cure(tmp_path, unreadable, words, code):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5)
    unreadable(words, code)
    with pytest.raises(ConfigError, match="there are snapshots, and none can be read") as found:
        open_snapshots(tmp_path, 2)
    assert str(tmp_path / "00000001") in str(found.value)
    assert "runAsUser or fsGroup" in str(found.value)


def test_a_rank_that_may_not_look_leaves_the_reading_to_others(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    path = saved(tmp_path, 1) / "00000001" / manifest.file_name(1)
    found, said = manifest.read(path), []

    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def gather(_: str, answer: bytes) -> list[bytes]:
        said.append(answer)
        return [answer if answer == b"{}" else b"1", answer]  # rank 0 reads what is asked of it

    monkeypatch.setattr(disk, "exists", closed)
    world: Any = SimpleNamespace(rank=1, size=2, gather_bytes=gather, sum=lambda numbers: numbers)
    resume._check_together(path.parent, found, world)
    assert said == [b"0", b"{}"]


@pytest.mark.parametrize("command", [commands.verify, commands.ls])
def test_what_retention_removes_meanwhile_is_not_damaged(tmp_path, monkeypatch, capsys, command):  # type: ignore[no-untyped-def]
    store, _ = open_snapshots(tmp_path, keep=2)
    save(store, 1, 2)
    read = manifest.read

    def late(path: Path) -> manifest.Manifest:
        found = read(path)
        if command is commands.ls or found.step == 1:
            monkeypatch.undo()
            save(store, 3)
        return read(path) if command is commands.ls else found

    monkeypatch.setattr(manifest, "read", late)
    assert command(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    name = f"00000001/{manifest.file_name(1)}"
    if command is commands.verify:
        assert lines == [f"{name}: removed meanwhile", f"{name[:-6]}2.json: ok"]
    else:
        assert [line.split()[3:4] + line.split()[5:] for line in lines[1:]] == [["2", "current"]]


def test_a_reader_is_told_that_retention_was_faster(tmp_path):  # type: ignore[no-untyped-def]
    store, _ = open_snapshots(tmp_path, keep=2)
    save(store, 1, 2)
    found = read_snapshot(tmp_path)
    save(store, 3, 4)
    with pytest.raises(SnapshotToolError, match=r"step 2 has changed .*snapshot\.keep"):
        _ = found.model["w"]
