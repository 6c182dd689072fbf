"""Snapshots on a real file system: every point of a save killed, every byte range damaged."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddpjob_trainer.errors import PeerLostError
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.restore.load import Source
from ddpjob_trainer.state.codec import flatten, unflatten
from support.snapshots import Store, open_snapshots, whole

CONFIG = {"seed": 1}


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(step)), "n": step, "nested": [torch.arange(step)]}


def save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(step, flatten(state(step)), CONFIG)


def check(loaded: Source | None, step: int) -> None:
    assert loaded is not None
    assert loaded.step == step
    assert loaded.manifest.config == CONFIG
    found = unflatten(whole(loaded))
    assert found["n"] == step
    assert torch.equal(found["w"], state(step)["w"])
    assert torch.equal(found["nested"][0], torch.arange(step))


@pytest.fixture(autouse=True)
def _no_seam() -> Iterator[None]:
    yield
    disk.seam = None


def test_data_files_are_plain_safetensors(tmp_path):  # type: ignore[no-untyped-def]
    save(open_snapshots(tmp_path)[0], 5)
    files = [load_file(path) for path in sorted(tmp_path.glob("*/*.safetensors"))]
    assert len(files) == 3
    pieces = {key: piece for file in files for key, piece in file.items() if key.startswith("w@")}
    ordered = sorted(pieces, key=lambda key: int(key.partition("@")[2]))
    assert torch.equal(torch.cat([pieces[key] for key in ordered]), state(5)["w"])


STEP = 4  # of the save that is disturbed


@dataclass
class At:
    point: int
    action: Callable[[], object]

    def __call__(self, operation: str, path: Path) -> None:
        self.point -= 1
        if self.point == -1:
            self.action()


def failing(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Two attempts; the next save of the second, which keeps two, has files of both to remove."""
    root = tmp_path / "begun"
    for attempt, steps in ((1, (1, 2)), (2, (3,))):
        save(open_snapshots(root, attempt, keep=3)[0], *steps)
    return root


def again(begun: Path, root: Path) -> Store:
    shutil.copytree(begun, root)
    return Store(root, 2, 2, 3)


def operations_of_a_save(begun: Path) -> int:
    seen: list[str] = []
    store = again(begun, begun.with_name("probe"))
    disk.seam = lambda operation, path: seen.append(operation)
    save(store, STEP)
    disk.seam = None
    assert seen.count("before fsync") >= 5
    assert seen.count("before unlink") >= 4
    assert seen.count("before rmtree") == 1
    return len(seen)


def is_killed_at(point: int, action: Callable[[], object]) -> bool:
    pid = os.fork()
    if pid == 0:
        disk.seam = At(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.tier("gate")
def test_killed_at_every_point_of_a_save_the_newest_durable_one_loads(tmp_path, begun):  # type: ignore[no-untyped-def]
    outcomes = []
    for point in range(operations_of_a_save(begun)):
        root = tmp_path / str(point)
        store = again(begun, root)
        assert is_killed_at(point, lambda: save(store, STEP))  # noqa: B023
        for path in root.glob("*/step-*.json"):  # a manifest goes before its data
            load.open_source(path.parent, manifest.read(path))
        last, loaded = open_snapshots(root, 3, keep=2)
        assert loaded is not None
        check(loaded, loaded.step)
        outcomes.append(loaded.step)
        save(last, STEP + 1, STEP + 2)  # and what was to be removed is
        assert {manifest.step_of(path.name) for path in root.glob("*/step-*.json")} <= {3, 4, 5, 6}
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {STEP - 1, STEP}


def test_a_power_cut_takes_no_snapshot(tmp_path, begun, monkeypatch):  # type: ignore[no-untyped-def]
    """A kill leaves the page cache whole; a power cut leaves what was synced, as it then was."""
    store = again(begun, tmp_path / "root")
    synced: dict[Path, int] = {}  # bytes
    order: list[str] = []
    sync = os.fsync

    def note(fd: int) -> None:
        sync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced[path] = os.fstat(fd).st_size
        order.append("synced directory" if path.is_dir() else "synced")

    def seam(operation: str, path: Path) -> None:
        order.append(operation)
        if operation == "before rename":  # the commit point
            new = list(path.parent.glob(f"step-*{STEP}[-.]*"))
            assert len(new) == 4  # of three ranks, and the manifest
            assert [synced.get(file) for file in new] == [file.stat().st_size for file in new]

    monkeypatch.setattr(disk.os, "fsync", note)
    disk.seam = seam
    save(store, STEP)
    committed = order.index("after rename")
    # What is older goes only when the new name is durable.
    assert "synced directory" in order[committed : order.index("before unlink")]


def test_killed_at_every_point_of_a_start_the_parent_still_loads(tmp_path):  # type: ignore[no-untyped-def]
    point, killed = -1, True
    while killed:
        point += 1
        root = tmp_path / str(point)
        save(open_snapshots(root)[0], 7)
        killed = is_killed_at(point, lambda: open_snapshots(root, 2))  # noqa: B023
        check(open_snapshots(root, 3)[1], 7)
    assert point > 10


def test_a_save_that_fails_anywhere_leaves_the_older_ones(tmp_path, begun):  # type: ignore[no-untyped-def]
    failed, code = 0, errno.ENOSPC
    for point in range(operations_of_a_save(begun)):
        root = tmp_path / str(point)
        store = again(begun, root)
        disk.seam = At(point, failing(code))
        try:
            save(store, STEP)
        except OSError as error:
            failed += error.errno == code
            if not list(root.glob(f"*/step-*{STEP}.json")):  # the space is free again
                assert not list(root.glob(f"*/step-{STEP:012d}*"))
        disk.seam = None
        named = [*root.glob(f"*/step-*{STEP}.json")]  # it counts only where the save returned
        save(store, STEP + 1)  # the next one works again
        assert not list(root.glob("*/*.tmp"))
        stays = len(named) if STEP not in store.verified else 0
        assert len(list(store.directory.glob("step-*.json"))) == 2 + stays
        check(open_snapshots(root, 3)[1], STEP + 1)
    assert failed > 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_start_that_fails_anywhere_leaves_what_there_was(tmp_path, begun, code):  # type: ignore[no-untyped-def]
    point, failed, succeeded = -1, 0, False
    while not succeeded:
        point += 1
        root = tmp_path / str(point)
        again(begun, root)
        disk.seam = seam = At(point, failing(code))
        try:
            check(open_snapshots(root, 3, keep=2)[1], STEP - 1)  # a link that fails is a copy
            succeeded = seam.point >= 0
        except OSError as error:
            failed += error.errno == code
        disk.seam = None
        check(open_snapshots(root, 4, keep=2)[1], STEP - 1)
    assert failed > 10


@pytest.mark.parametrize("suffix", ["-0.safetensors", "-1.safetensors", "-2.safetensors", ".json"])
def test_any_flipped_or_missing_byte_gives_way_to_the_older(tmp_path, suffix, capsys):  # type: ignore[no-untyped-def]
    store, _ = open_snapshots(tmp_path / "origin")
    save(store, 1, 2)
    (newest,) = (tmp_path / "origin").glob(f"*/step-000000000002*{suffix}")
    data = newest.read_bytes()
    places = range(0, len(data), max(1, len(data) // 40))
    for place in places:
        for damaged in (data[:place], data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]):
            newest.unlink()
            newest.write_bytes(damaged)
            found = _load_only(newest.parent)
            assert found == [1], (place, len(damaged))
    newest.unlink()
    newest.write_bytes(data)
    assert _load_only(newest.parent) == [1, 2]
    newest.write_bytes(data[:-1])
    check(open_snapshots(tmp_path / "origin", 2)[1], 1)
    assert "is not usable" in capsys.readouterr().err
    assert newest.exists(), "one reader's word"


def _load_only(directory: Path) -> list[int]:
    good = []
    for path in sorted(directory.glob("step-*.json")):
        try:
            found = manifest.read(path)
            whole(load.open_source(directory, found))
        except manifest.InvalidSnapshotError:
            continue
        good.append(found.step)
    return good


@pytest.mark.parametrize("newest", [10, 15])
def test_what_a_zombie_commits_and_removes_counts_for_nobody(tmp_path, newest):  # type: ignore[no-untyped-def]
    zombie, _ = open_snapshots(tmp_path, 1)
    save(zombie, 10)
    live, loaded = open_snapshots(tmp_path, 2)
    check(loaded, 10)
    save(zombie, 20, 30, 40, 50, 60)  # retention of the zombie runs as well
    if newest != 10:
        save(live, newest)
    check(open_snapshots(tmp_path, 3)[1], newest)


def commit_late(root: Path, uid: str, attempt: int) -> None:
    """As one that stopped between its check and its claim, or its start record, and wakes up."""
    late = lineage.claim(root)
    lineage.write_start(root, lineage.Start(late, uid, attempt, 0))
    save(Store(root, late, 3, 3), 99)


def test_a_zombie_that_starts_late_is_refused_or_does_not_take_the_lead(tmp_path):  # type: ignore[no-untyped-def]
    save(open_snapshots(tmp_path, 2)[0], 5)
    with pytest.raises(PeerLostError, match="attempt 2 round 0 of this job has already started"):
        open_snapshots(tmp_path, 1)
    commit_late(tmp_path, "u", 1)
    check(open_snapshots(tmp_path, 3)[1], 5)


def test_resume_never_means_the_job_not_each_of_its_attempts(tmp_path):  # type: ignore[no-untyped-def]
    save(open_snapshots(tmp_path, 1, uid="old")[0], 50)
    assert open_snapshots(tmp_path, 1, resume=False)[1] is None
    assert open_snapshots(tmp_path, 2, resume=False)[1] is None  # nothing of its own yet
    save(open_snapshots(tmp_path, 3, resume=False)[0], 5)
    check(open_snapshots(tmp_path, 4, resume=False)[1], 5)


def test_a_zombie_of_a_deleted_job_of_the_same_name_goes_on_alone(tmp_path):  # type: ignore[no-untyped-def]
    save(open_snapshots(tmp_path, 1, uid="deleted")[0], 5)
    for attempt in (1, 2, 3):
        live, _ = open_snapshots(tmp_path, attempt, uid="live", keep=2)
        save(live, *range(10 * attempt, 10 * attempt + 3))
    zombie, loaded = open_snapshots(tmp_path, 2, uid="deleted")
    check(loaded, 5)
    save(zombie, *range(90, 99))
    commit_late(tmp_path, "deleted", 3)
    check(open_snapshots(tmp_path, 4, uid="live")[1], 32)
    check(open_snapshots(tmp_path, 1, uid="third")[1], 32)


def test_a_start_record_with_a_flipped_bit_is_not_believed(tmp_path, capsys):  # type: ignore[no-untyped-def]
    zombie, _ = open_snapshots(tmp_path, 1)
    save(zombie, 10)
    open_snapshots(tmp_path, 2)
    save(zombie, 30)
    record = tmp_path / "00000002/start.json"
    data = record.read_bytes()
    assert b'"parent_step":10' in data
    record.write_bytes(data.replace(b'"parent_step":10', b'"parent_step":30'))
    assert set(lineage.read_starts(lineage.Disk(tmp_path))) == {1}
    open_snapshots(tmp_path, 3)
    assert "00000002/start.json is not usable" in capsys.readouterr().err


def test_few_snapshots_and_directories_stay_however_many_attempts(tmp_path):  # type: ignore[no-untyped-def]
    step = 0
    for attempt in range(1, 12):
        store, _ = open_snapshots(tmp_path, attempt, keep=2)
        save(store, *range(step + 1, step + 1 + attempt % 3))
        step += attempt % 3
    steps = {manifest.step_of(p.name) for p in tmp_path.glob("*/step-*.json")}
    assert step in steps
    assert len(steps) <= 4
    assert len(lineage.sequences(tmp_path)) <= 4
    last, loaded = open_snapshots(tmp_path, 99, keep=2)
    check(loaded, step)
    save(last, *range(step + 1, step + 4))
    names = [path.name for path in last.directory.iterdir()]
    assert sorted(name for name in names if name.endswith(".json")) == [
        "start.json", manifest.file_name(step + 2), manifest.file_name(step + 3),
    ]  # fmt: skip
    assert sum(name.endswith(".safetensors") for name in names) == 2 * 3
