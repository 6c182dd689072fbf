"""Whose snapshots stay, whoever else writes to the directory or to the bucket."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.options import SnapshotOptions
from ddpjob_trainer.snapshot.manager import Snapshots
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import seal, unseal
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.retention import retain
from ddpjob_trainer.snapshot.remote.fetch import fetch
from ddpjob_trainer.snapshot.remote.store import Store as Remote
from ddpjob_trainer.snapshot.remote.upload import Uploader, draw
from ddpjob_trainer.state.codec import flatten
from ddpjob_trainer.training.start import _snapshot_settings
from support.snapshots import Store, open_snapshots

SECRET = b"secret of the job".hex()


def save(store: Store, *steps: int, **config: Any) -> None:
    for step in steps:
        store.save(step, flatten({"model": {"w": torch.full((30,), float(step))}}), config)


def saved(root: Path, *steps: int, **options: Any) -> Store:
    store, _ = open_snapshots(root, **options)
    save(store, *steps)
    return store


def step_of(found: tuple[Store, Any]) -> int | None:
    return None if found[1] is None else int(found[1].step)


def steps(root: Path) -> set[int | None]:
    return {manifest.step_of(path.name) for path in root.glob("*/step-*.json")}


# --- Another job's ----------------------------------------------------------------------------


@pytest.mark.fault("S8")
def test_the_newest_of_each_other_job_stays(tmp_path):  # type: ignore[no-untyped-def]
    """resume: Never is how one trains anew, and looks at the weights of before once more."""
    saved(tmp_path, 400, 450, 500, uid="a")
    saved(tmp_path, 1, 2, uid="b", resume=False)
    for attempt in (1, 2, 3):
        store, _ = open_snapshots(tmp_path, attempt, uid="c", resume=False, keep=2)
        save(store, *range(10 * attempt, 10 * attempt + 5))
    assert {500, 2, 33, 34} <= steps(tmp_path)
    assert not {400, 13} & steps(tmp_path), "two of each: one may never have been read back"
    assert step_of(open_snapshots(tmp_path, 2, uid="a")) == 500, "its files are there as well"


def test_runs_without_an_operator_are_one_job(tmp_path):  # type: ignore[no-untyped-def]
    """Each of them has another uid: else every restart by hand would leave a snapshot."""
    for number in range(6):
        store, _ = open_snapshots(tmp_path, 1, uid=f"local-none-{number}", keep=2)
        save(store, *range(10 * number, 10 * number + 5))
    assert steps(tmp_path) <= {43, 44, 53, 54}


@pytest.mark.fault("S8")
def test_so_it_does_in_a_store(tmp_path):  # type: ignore[no-untyped-def]
    store = Remote(f"file://{tmp_path}/store")
    for uid, first in (("a", 100), ("b", 10)):
        local, _ = open_snapshots(tmp_path / uid, 1, uid=uid)
        uploader = Uploader(store, tmp_path / uid, local.sequence, 2)
        for step in range(first, first + 5):
            save(local, step)
            uploader.upload(step)
    assert steps(tmp_path / "store") == {103, 104, 13, 14}


@pytest.mark.parametrize("gone", [1, 2, 3])
@pytest.mark.fault("S7")
def test_a_manifest_without_its_files_counts_for_nothing(tmp_path, gone):  # type: ignore[no-untyped-def]
    """So many of the newest: the only whole ones used to be removed as the oldest."""
    store = saved(tmp_path, 1, 2, 3, keep=9)
    for step in range(4 - gone, 4):
        for path in store.directory.glob(f"step-{step:012d}-*-1.safetensors"):
            path.unlink()
    for _ in range(3):
        retain(tmp_path, store.sequence, 2, {1, 2, 3})
    whole = set(range(1, 4 - gone))
    assert {*sorted(whole)[-2:]} <= steps(tmp_path)
    if whole:
        assert step_of(open_snapshots(tmp_path, 2)) == max(whole)


def test_what_one_reader_cannot_parse_keeps_its_files(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    store = saved(tmp_path, 1, 2, 3, keep=9)
    read = manifest.read

    def wrong(path: Path) -> manifest.Manifest:
        if path.name == manifest.file_name(2):
            raise manifest.InvalidSnapshotError("its bits are wrong")
        return read(path)

    monkeypatch.setattr(manifest, "read", wrong)
    retain(tmp_path, store.sequence, 2, {1, 2, 3})
    monkeypatch.undo()
    shutil.rmtree(store.directory / "x", ignore_errors=True)
    store.directory.joinpath(manifest.file_name(3)).unlink()
    assert step_of(open_snapshots(tmp_path, 2)) == 2


@pytest.mark.fault("S4")
def test_a_record_that_this_rank_cannot_read_now_spares_its_directory(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    saved(tmp_path, 500, uid="a")
    store, _ = open_snapshots(tmp_path, 1, uid="b", resume=False, keep=2)
    read = disk.read_bounded

    def fails(path: Path, most: int) -> bytes:
        if path == tmp_path / "00000001" / lineage.START:
            raise OSError(5, "Input/output error")
        return read(path, most)

    monkeypatch.setattr(disk, "read_bounded", fails)
    save(store, *range(1, 7))
    assert {500, 5, 6} == steps(tmp_path)


def test_the_last_verified_stays_though_this_rank_does_not_see_its_files(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """Its listing is old. What was never read back takes no place of it."""
    store = saved(tmp_path, 1, 2, 3, 4, 5, keep=9)
    real = Path.lstat

    def old(path: Path) -> os.stat_result:
        if path.name.startswith("step-000000000002-"):
            raise FileNotFoundError(path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", old)
        retain(tmp_path, store.sequence, 2, {1, 2})
    assert 2 in steps(tmp_path)
    assert not any(path.name == manifest.file_name(3) for path in store.directory.iterdir())


# --- Names and records of strangers -------------------------------------------------------------


NAMES = {
    "255 digits": lambda root: (root / ("9" * 255)).mkdir(),
    "20 digits": lambda root: (root / ("9" * 20)).mkdir(),
    "10 digits": lambda root: (root / ("9" * 10)).mkdir(),
    "the highest": lambda root: (root / "999999999").mkdir(),
    "files": lambda root: [(root / f"{n:08d}").touch() for n in range(2, 1002)],
    "links": lambda root: [(root / f"{n:08d}").symlink_to("/") for n in range(2, 12)],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fault("S3")
def test_names_of_strangers_neither_block_a_start_nor_hide_snapshots(tmp_path, name, capsys):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5)
    NAMES[name](tmp_path)
    for attempt in (2, 3, 4):
        store, loaded = open_snapshots(tmp_path, attempt)
        assert loaded is not None
        assert loaded.step == 5 * (attempt - 1)
        save(store, 5 * attempt)
    said = capsys.readouterr().err
    assert said.count("foreign entries, such as") == (0 if name == "the highest" else 3)
    assert max(map(len, said.splitlines()), default=0) < 300


RECORDS = {
    "a later attempt": Start(7, "u", 10**9, 0),
    "a later round": Start(7, "u", 1, 10**6),
    "a successor": Start(7, "v", 1, 0, predecessors=("u",)),
    "of the highest number": Start(999_999_999, "v", 1, 0, predecessors=("u",)),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.fault("S3")
def test_a_record_that_the_job_has_not_signed_ends_nobody(tmp_path, name, capsys):  # type: ignore[no-untyped-def]
    job: dict[str, Any] = {"secret": SECRET}
    store, _ = open_snapshots(tmp_path, 1, **job)
    save(store, 5)
    start = RECORDS[name]
    lineage.directory(tmp_path, start.sequence).mkdir()
    lineage.write_start(tmp_path, start)
    for attempt in (2, 3):
        assert step_of(open_snapshots(tmp_path, attempt, **job)) == 5
    assert ("forged" in capsys.readouterr().err) == (start.uid == "u")
    with pytest.raises(PeerLostError, match="attempt 3 round 0 of this job has already started"):
        open_snapshots(tmp_path, 2, **job)  # that one is real


def test_what_an_older_version_has_left_unsigned_is_gone_on_from(tmp_path):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5)
    store, loaded = open_snapshots(tmp_path, 2, secret=SECRET)
    assert loaded is not None
    assert loaded.step == 5
    save(store, 6)
    assert step_of(open_snapshots(tmp_path, 3, secret=SECRET)) == 6


def test_an_unsigned_record_does_not_hide_what_the_job_has_signed(tmp_path):  # type: ignore[no-untyped-def]
    for attempt in (1, 2):
        save(open_snapshots(tmp_path, attempt, secret=SECRET)[0], attempt)
    lineage.directory(tmp_path, 9).mkdir()
    lineage.write_start(tmp_path, Start(9, "u", 2, 10**6))
    assert step_of(open_snapshots(tmp_path, 3, secret=SECRET)) == 2


def test_a_chain_that_never_had_a_snapshot_hides_none_of_an_earlier_job(tmp_path):  # type: ignore[no-untyped-def]
    saved(tmp_path, 5, uid="a")
    open_snapshots(tmp_path, 1, uid="b", resume=False)
    assert step_of(open_snapshots(tmp_path, 1, uid="c")) == 5


# --- Never anew by accident -----------------------------------------------------------------------


def test_what_the_status_knows_is_missed(tmp_path):  # type: ignore[no-untyped-def]
    words = r"status says that there was one of step 40\. Put the files back.*resume: Never"
    with pytest.raises(ConfigError, match=words):
        open_snapshots(tmp_path, 2, known_step=40)
    assert not list(tmp_path.iterdir())
    saved(tmp_path, 5)
    assert step_of(open_snapshots(tmp_path, 2, known_step=40)) == 5


def test_a_directory_that_lost_its_record_is_missed(tmp_path):  # type: ignore[no-untyped-def]
    store = saved(tmp_path, 5)
    (store.directory / lineage.START).unlink()
    with pytest.raises(ConfigError, match="00000001 holds one of step 5"):
        open_snapshots(tmp_path, 1, uid="v")
    assert step_of(open_snapshots(tmp_path, 1, uid="v", resume=False)) is None


def test_another_namespaces_snapshots_are_not_gone_on_from(tmp_path):  # type: ignore[no-untyped-def]
    save(open_snapshots(tmp_path, 1, uid="a", namespace="one")[0], 5, namespace="one")
    other: dict[str, Any] = {"uid": "b", "namespace": "two"}
    with pytest.raises(ConfigError, match=r"namespace 'one'.*'two'\. Give this job a directory"):
        open_snapshots(tmp_path, 1, **other)
    moved = frozenset({"namespace"})
    assert step_of(open_snapshots(tmp_path, 1, **other, allow_changes=moved)) == 5
    assert step_of(open_snapshots(tmp_path, 2, uid="a", namespace="one")) == 5


def test_a_job_that_is_applied_again_finds_its_namespaces_snapshots(tmp_path):  # type: ignore[no-untyped-def]
    save(open_snapshots(tmp_path, 1, uid="a", namespace="one")[0], 5, namespace="one")
    other, _ = open_snapshots(tmp_path, 1, uid="b", namespace="two", resume=False)
    save(other, 7, namespace="two")
    assert step_of(open_snapshots(tmp_path, 1, uid="c", namespace="one")) == 5


def test_an_empty_manifest_of_a_stranger_is_no_snapshot_that_was_lost(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "00000005").mkdir()
    (tmp_path / "00000005" / manifest.file_name(1)).touch()
    assert step_of(open_snapshots(tmp_path, 1)) is None


# --- A bucket -----------------------------------------------------------------------------------


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    """A store with the snapshot of step 5."""
    store = Remote(f"file://{tmp_path}/store")
    local, _ = open_snapshots(tmp_path / "a")
    save(local, 5)
    Uploader(store, tmp_path / "a", local.sequence, 2, SECRET).upload(5)
    return store


def bring(store: Remote, root: Path, attempt: int = 2, **identity: Any) -> int | None:
    given = Identity(**{"uid": "u", "attempt": attempt, "round": 0, "unique": True} | identity)
    return fetch(store, root, given, resume=True, tell=print)


@pytest.mark.parametrize("name", ["9" * 15, "9" * 20, "099999999999999"])
def test_a_folder_of_a_stranger_does_not_hide_our_uploads(remote, tmp_path, name, capsys):  # type: ignore[no-untyped-def]
    remote._fs.makedirs(f"{remote._root}/{name}")
    remote._fs.pipe_file(f"{remote._root}/{name}/x", b"")
    assert bring(remote, tmp_path / "b") == 5
    local, _ = open_snapshots(tmp_path / "b", 2)
    save(local, 6)
    Uploader(remote, tmp_path / "b", local.sequence, 2).upload(6)
    assert bring(remote, tmp_path / "c", 3) == 6
    assert ("foreign folders, such as" in capsys.readouterr().out) == name.startswith("9")


def test_the_highest_numbers_are_not_drawn_beyond():  # type: ignore[no-untyped-def]
    assert draw([1_500_000, 99_999_999_999_999]) < 3_000_000


def test_a_record_in_the_bucket_must_be_signed_as_well(remote, tmp_path):  # type: ignore[no-untyped-def]
    forged = Start(7, "u", 10**9, 0)
    remote.write(7, lineage.START, seal(asdict(forged)))
    assert bring(remote, tmp_path / "b", secret=SECRET) == 5


def test_a_manifest_that_claims_terabytes_fetches_nothing(remote, tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    (number,) = remote.numbers()
    found = unseal(remote.read(number, manifest.file_name(5), 1 << 20))
    for file in found["files"]:
        file["bytes"] += 1 << 40
    remote.write(number, manifest.file_name(5), seal(found))
    monkeypatch.setattr(Remote, "pieces", lambda *_: pytest.fail("it is fetched"))
    with pytest.raises(ConfigError, match="there was one, so training does not begin anew: step 5"):
        bring(remote, tmp_path / "b")
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]


def test_what_the_disk_has_no_room_for_is_not_begun(remote, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*room[:3], 0, 0, *room[5:10])))
    with pytest.raises(OSError, match="there is room for 0"):
        bring(remote, tmp_path / "b")


def test_a_bucket_whose_snapshots_are_all_gone_is_no_new_one(remote, tmp_path):  # type: ignore[no-untyped-def]
    (number,) = remote.numbers()
    for name in remote.names(number):
        if name.endswith(".safetensors"):
            remote.remove(number, name)
    with pytest.raises(ConfigError, match="begin anew"):
        bring(remote, tmp_path / "b")
    remote.remove(number, lineage.START)
    with pytest.raises(ConfigError, match=f"folder {number} has no valid start.json, and step 5"):
        bring(remote, tmp_path / "b")


# --- Durable, and on a full disk ------------------------------------------------------------------


def test_the_directories_above_are_durable_before_a_start(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """A power cut would take the job's whole directory, with all that was acknowledged in it."""
    synced: list[Path] = []
    sync = disk.sync_directory
    monkeypatch.setattr(disk, "sync_directory", lambda p: (synced.append(p), sync(p)))
    open_snapshots(tmp_path / "a/b/job")
    assert synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a/b"]
    synced.clear()
    open_snapshots(tmp_path / "a/b/job", 2)  # the first may have been killed before
    assert synced[0] == tmp_path / "a/b"


def test_a_reserve_is_kept_and_used(tmp_path):  # type: ignore[no-untyped-def]
    disk.keep_reserve(tmp_path)
    disk.keep_reserve(tmp_path)
    assert (tmp_path / disk.RESERVE).stat().st_size == 1 << 20
    assert disk.use_reserve(tmp_path)
    assert not disk.use_reserve(tmp_path)


# --- What the status may name -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "url", "named"),
    [(False, "", [50]), (False, "s3://x", [50]), (True, "s3://x", [25, 50]), (True, "", [50])],
)
def test_what_ends_with_its_pod_is_named_once_it_was_uploaded(tmp_path, ends, url, named):  # type: ignore[no-untyped-def]
    settings = SnapshotSettings(tmp_path, 25, 2, resume=True, upload=url, ends_with_pod=ends)
    progress = Mock()
    snapshots = Snapshots(settings, Mock(rank=1), progress)
    snapshots.learn([51.0, 26.0, 51.0, 0.0])  # step 50 was read back, 25 was uploaded
    assert snapshots.newest == 50
    snapshots.learn([51.0, 51.0, 51.0, 0.0])
    assert [call.args[0] for call in progress.saved.call_args_list] == named


@pytest.mark.parametrize(
    ("ends", "url", "directory", "known"),
    [
        (False, None, None, 40),
        (False, None, "fold-2", 0),  # the status knows of those in the job's directory
        (True, None, None, 0),  # which ended with the pod, as is known
        (True, "memory://x", None, 40),
    ],
)
def test_what_a_run_is_known_to_have_had(tmp_path, ends, url, directory, known):  # type: ignore[no-untyped-def]
    given = SnapshotSettings(
        tmp_path, 1, 2, resume=True, upload="", ends_with_pod=ends, known_step=40
    )
    asked = SnapshotOptions(snapshot_upload=url, snapshot_dir=directory)
    assert _snapshot_settings(given, asked).known_step == known
