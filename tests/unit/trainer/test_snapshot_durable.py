"""What stays on a disk: whatever a process is killed at, and whatever retention removes."""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.files import retain
from ddpjob_trainer.snapshot.restore.load import open_source
from support.snapshots import (
    Store,
    error,
    exit_code,
    loaded_step,
    open_snapshots,
    save,
    saved,
    step_of,
    steps_in,
)

STEP = 4  # of the save that is disturbed


@pytest.fixture(autouse=True)
def _no_seam() -> Iterator[None]:
    yield
    disk.seam = None


@dataclass
class At:
    """Acts once, at one point of all those before and after an operation."""

    point: int
    action: Callable[[], object]

    def __call__(self, operation: str, path: Path) -> None:
        self.point -= 1
        if self.point == -1:
            self.action()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Two attempts; the next save of the second, which keeps two, has files of both to remove."""
    saved(tmp_path / "begun", 1, 2)
    saved(tmp_path / "begun", 3, attempt=2)
    return tmp_path / "begun"


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
    def program() -> None:
        disk.seam = At(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
        action()

    code = exit_code(program)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check_all_open(root: Path) -> None:
    """A manifest goes before its data."""
    for path in root.glob("*/step-*.json"):
        open_source(path.parent, manifest.read(path))


# --- At every point ---------------------------------------------------------------------------


@pytest.mark.tier("gate")
def test_killed_anywhere_in_a_save_the_newest_durable_one_loads(tmp_path, begun):
    outcomes = []
    for point in range(operations_of_a_save(begun)):
        root = tmp_path / str(point)
        store = again(begun, root)
        assert is_killed_at(point, lambda: save(store, STEP))  # noqa: B023
        check_all_open(root)
        last, source = open_snapshots(root, 3, keep=2)
        outcomes.append(step_of(source))
        save(last, STEP + 1, STEP + 2)  # and what was to be removed is
        assert steps_in(root) <= {3, 4, 5, 6}
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {STEP - 1, STEP}


def test_killed_anywhere_in_a_start_the_parent_still_loads(tmp_path):
    point, killed = -1, True
    while killed:
        point += 1
        root = tmp_path / str(point)
        saved(root, 7)
        killed = is_killed_at(point, lambda: open_snapshots(root, 2))  # noqa: B023
        assert loaded_step(root, 3) == 7
    assert point > 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_start_that_fails_anywhere_leaves_what_there_was(tmp_path, begun, code):
    point, failed, succeeded = -1, 0, False
    while not succeeded:
        point += 1
        root = tmp_path / str(point)
        again(begun, root)
        disk.seam = seam = At(point, Mock(side_effect=error(code)))
        try:
            assert loaded_step(root, 3, keep=2) == STEP - 1  # a link that fails is a copy
            succeeded = seam.point >= 0
        except OSError as caught:
            failed += caught.errno == code
        disk.seam = None
        assert loaded_step(root, 4, keep=2) == STEP - 1
    assert failed > 10


def test_a_power_cut_takes_no_snapshot(tmp_path, begun, monkeypatch):
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


def test_the_directories_above_are_durable_before_a_start(tmp_path, monkeypatch):
    """A power cut would take the job's whole directory, with all that was acknowledged in it."""
    synced: list[Path] = []
    sync = disk.sync_directory
    monkeypatch.setattr(disk, "sync_directory", lambda p: (synced.append(p), sync(p)))
    open_snapshots(tmp_path / "a/b/job")
    assert synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a/b"]
    synced.clear()
    open_snapshots(tmp_path / "a/b/job", 2)  # the first may have been killed before
    assert synced[0] == tmp_path / "a/b"


def test_a_reserve_is_kept_and_used(tmp_path):
    disk.keep_reserve(tmp_path)
    disk.keep_reserve(tmp_path)
    assert (tmp_path / disk.RESERVE).stat().st_size == 1 << 20
    assert [disk.use_reserve(tmp_path), disk.use_reserve(tmp_path)] == [True, False]


# --- Retention --------------------------------------------------------------------------------


def test_few_snapshots_and_directories_stay_however_many_attempts(tmp_path):
    step = 0
    for attempt in range(1, 12):
        saved(tmp_path, *range(step + 1, step + 1 + attempt % 3), attempt=attempt, keep=2)
        step += attempt % 3
    assert step in steps_in(tmp_path)
    assert len(steps_in(tmp_path)) <= 4
    assert len(lineage.sequences(tmp_path)) <= 4
    last, source = open_snapshots(tmp_path, 99, keep=2)
    assert step_of(source) == step
    save(last, *range(step + 1, step + 4))
    names = [path.name for path in last.directory.iterdir()]
    left = ["start.json", manifest.file_name(step + 2), manifest.file_name(step + 3)]
    assert sorted(name for name in names if name.endswith(".json")) == left
    assert sum(name.endswith(".safetensors") for name in names) == 2 * 3


def test_restarts_without_progress_do_not_fill_a_disk_without_links(tmp_path, monkeypatch):
    """Each has copied the same snapshot. Their records stay: the chain goes on to older ones."""
    monkeypatch.setattr(os, "link", Mock(side_effect=error(errno.EPERM)))
    saved(tmp_path, 4, 5)
    for attempt in range(2, 12):
        assert loaded_step(tmp_path, attempt) == 5
    copies = list(tmp_path.glob("*/step-*05.json"))
    assert len(copies) == 3
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 3 * 3 + 3
    for path in copies:
        path.write_bytes(b"damaged")
    assert loaded_step(tmp_path, 12) == 4


@pytest.mark.fault("S8")
def test_the_newest_two_of_each_other_job_stay(tmp_path):
    for uid, steps in {"a": (400, 450, 500), "b": (1, 2), "c": (10, 11, 12)}.items():
        saved(tmp_path, *steps, uid=uid, resume=False)
    saved(tmp_path, *range(20, 25), uid="d", resume=False, keep=2)
    assert steps_in(tmp_path) == {450, 500, 1, 2, 11, 12, 23, 24}, "one may never be read back"


def test_runs_without_an_operator_are_one_job(tmp_path):
    """Each of them has another uid: else every restart by hand would leave a snapshot."""
    for n in range(6):
        saved(tmp_path, *range(10 * n, 10 * n + 5), uid=f"local-none-{n}", keep=2)
    assert steps_in(tmp_path) <= {43, 44, 53, 54}


@pytest.mark.parametrize("gone", [1, 2, 3])
@pytest.mark.fault("S7")
def test_a_manifest_without_its_files_counts_for_nothing(tmp_path, gone):
    """So many of the newest: the only whole ones used to be removed as the oldest."""
    store = saved(tmp_path, 1, 2, 3, keep=9)
    for step in range(4 - gone, 4):
        for path in store.directory.glob(f"step-{step:012d}-*-1.safetensors"):
            path.unlink()
    for _ in range(3):
        retain(tmp_path, store.sequence, 2, {1, 2, 3})
    whole = [*range(1, 4 - gone)][-2:]
    assert {*whole} <= steps_in(tmp_path)
    if whole:
        assert loaded_step(tmp_path) == whole[-1]


WRONG = manifest.InvalidSnapshotError("its bits are wrong")


@pytest.mark.parametrize("why", [WRONG, error(errno.EIO)], ids=["wrong bits", "EIO"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_manifest_that_cannot_be_read_now_keeps_its_files(tmp_path, monkeypatch, step, why):
    store, read = saved(tmp_path, 1, 2, 3, keep=9), manifest.read
    os.utime(unread := store.directory / manifest.file_name(step))  # it is not known yet

    def reads(path: Path) -> manifest.Manifest:
        if path == unread:
            raise why
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "read", reads)
        retain(tmp_path, store.sequence, 1, {1, 2, 3})
    assert steps_in(tmp_path) == {step, 3}
    check_all_open(tmp_path)


@pytest.mark.fault("S4")
def test_a_record_that_cannot_be_read_now_spares_its_directory(tmp_path, monkeypatch):
    saved(tmp_path, 500, uid="a")
    store = saved(tmp_path, uid="b", resume=False, keep=2)
    read = disk.read_bounded

    def fails(path: Path, most: int) -> bytes:
        if path == tmp_path / "00000001" / lineage.START:
            raise error(errno.EIO)
        return read(path, most)

    monkeypatch.setattr(disk, "read_bounded", fails)
    save(store, *range(1, 7))
    assert steps_in(tmp_path) == {500, 5, 6}


def test_the_last_verified_stays_though_its_files_are_not_seen(tmp_path, monkeypatch):
    """This rank's listing is old. What was never read back takes no place of it."""
    store = saved(tmp_path, 1, 2, 3, 4, 5, keep=9)
    real = Path.lstat

    def old(path: Path) -> os.stat_result:
        if path.name.startswith("step-000000000002-"):
            raise FileNotFoundError(path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", old)
        retain(tmp_path, store.sequence, 2, {1, 2})
    assert 2 in steps_in(tmp_path)
    assert 3 not in steps_in(store.root)


def test_what_a_user_named_by_a_date_is_not_removed(tmp_path):
    notes = tmp_path / "20260101/notes.txt"
    notes.parent.mkdir()
    notes.write_text("precious")
    (tmp_path / "20260102").mkdir()
    saved(tmp_path, 1, 2, keep=1)
    assert notes.read_text() == "precious"
    assert (tmp_path / "20260102").exists()
