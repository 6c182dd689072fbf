"""Snapshots in an object store: copied, fenced, kept few, fetched to a fresh disk.

The cases of S3 run where s3fs and moto are installed: in the environment of `make foreign`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

from ddpjob_trainer import cli
from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.launcher.reports.evidence import Keeper
from ddpjob_trainer.snapshot.ondisk import lineage, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import seal, unseal
from ddpjob_trainer.snapshot.remote import client, process
from ddpjob_trainer.snapshot.remote.client import Uploads, check_upload, fetch_if_newer
from ddpjob_trainer.snapshot.remote.fetch import fetch
from ddpjob_trainer.snapshot.remote.process import UploadQueue as Retries
from ddpjob_trainer.snapshot.remote.store import Store
from ddpjob_trainer.snapshot.remote.upload import Uploader, draw, read
from ddpjob_trainer.state.codec import flatten, unflatten
from support.patience import PATIENCE, wait_for
from support.snapshots import Clock, open_snapshots, whole
from support.snapshots import Store as Disk


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="s3fs is not installed: make foreign")
    moto = pytest.importorskip("moto.server", reason="moto is not installed: make foreign")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_DEFAULT_REGION", "us-east-1"),
        ):  # fmt: skip
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    name = uuid.uuid4().hex
    return f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/store"


@pytest.fixture
def store(url: str) -> Store:
    return Store(url)


def save(disk: Disk, *steps: int) -> None:
    for step in steps:
        disk.save(step, flatten({"w": torch.full((64,), float(step)), "n": step}), {"seed": 1})


def uploaded(
    root: Path, store: Store, attempt: int, *steps: int, keep: int = 2, **options: Any
) -> tuple[Disk, Uploader]:
    disk, _ = open_snapshots(root, attempt, keep=keep, **options)
    uploader = Uploader(store, root, disk.sequence, keep)
    for step in steps:
        save(disk, step)
        uploader.upload(step)
    return disk, uploader


def number_of(store: Store) -> int:
    (number,) = store.numbers()
    return number


def bring(store: Store, root: Path, attempt: int, *, uid: str = "u", resume: bool = True) -> Any:
    identity = Identity(uid, attempt, 0, unique=True)
    return fetch(store, root, identity, resume=resume, tell=print)


def loaded_step(root: Path, attempt: int, uid: str = "u") -> int | None:
    loaded = open_snapshots(root, attempt, uid=uid)[1]
    if loaded is None:
        return None
    found = unflatten(whole(loaded))
    assert torch.equal(found["w"], torch.full((64,), float(found["n"])))
    return int(found["n"])


def test_a_fresh_disk_goes_on_where_the_store_is(store, tmp_path):  # type: ignore[no-untyped-def]
    disk, uploader = uploaded(tmp_path / "a", store, 1, 1, 2)
    path = disk.directory / manifest.file_name(2)
    found = manifest.read(path)
    path.write_bytes(replace(found, config={**found.config, "finished": 2}).encode())
    uploader.upload(2)  # marked since
    assert bring(store, tmp_path / "b", 2) == 2
    source = open_snapshots(tmp_path / "b", 2)[1]
    assert source is not None
    assert source.manifest.config == {"seed": 1, "finished": 2}
    assert bring(store, tmp_path / "b", 3) is None  # the disk is newer now
    assert bring(store, tmp_path / "a", 2) is None  # and so it was there
    assert loaded_step(tmp_path / "a", 2) == 2


def test_a_disk_of_an_earlier_attempt_takes_the_later_one_from_the_store(store, tmp_path):  # type: ignore[no-untyped-def]
    uploaded(tmp_path / "a", store, 1, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    uploaded(tmp_path / "a", store, 2, 5)
    assert bring(store, tmp_path / "b", 3) == 5
    assert loaded_step(tmp_path / "b", 3) == 5


@pytest.mark.parametrize("keep", [2, 9])
def test_what_a_zombie_uploads_counts_for_nobody(store, tmp_path, keep):  # type: ignore[no-untyped-def]
    """With 9 its folder stays, as its successor has not yet so many of its own."""
    disk, zombie = uploaded(tmp_path / "a", store, 1, 10)
    late_disk, late = uploaded(tmp_path / "late", store, 1)
    save(late_disk, 10)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    uploaded(tmp_path / "b", store, 2, 15, keep=keep)
    numbers = store.numbers()
    with pytest.raises(PeerLostError, match="already started"):
        late.upload(10)
    assert store.numbers() == numbers, "one that begins late does not begin"
    for step in (20, 30, 40):
        save(disk, step)
        with pytest.raises(PeerLostError, match="a later incarnation uploads"):
            zombie.upload(step)
    assert bring(store, tmp_path / "c", 3) == 15
    # Nor can its retention take away what its successor began with.
    (number,) = (n for n in store.starts()[0] if store.starts()[0][n].attempt == 2)
    assert lineage.steps(store, number, None) == [10, 15]
    with pytest.raises(PeerLostError, match="attempt 2 round 0 of this job has already started"):
        bring(store, tmp_path / "d", 1)


def test_few_stay_however_many_attempts(store, tmp_path):  # type: ignore[no-untyped-def]
    for attempt in range(1, 6):
        uploaded(tmp_path / "a", store, attempt, *range(3 * attempt - 2, 3 * attempt + 1))
    number = number_of(store)
    assert lineage.steps(store, number, None) == [14, 15]
    names = store.names(number)
    assert sum(name.endswith(".safetensors") for name in names) == 2 * 3
    assert bring(store, tmp_path / "b", 9) == 15


def test_numbers_are_drawn_above_all_others():  # type: ignore[no-untyped-def]
    drawn = {draw([1_500_000]) for _ in range(20)}
    assert len(drawn) >= 19  # of a million numbers: two may be the same
    assert min(drawn) > 1_500_000


def test_a_parent_whose_disk_has_gone_on_is_in_the_store_first(store, tmp_path):  # type: ignore[no-untyped-def]
    """The upload begins late: the parent's manifest is no longer on disk."""
    disk, _ = uploaded(tmp_path / "a", store, 1)
    save(disk, 1)
    later, uploader = uploaded(tmp_path / "a", store, 2)
    save(later, 2, 3, 4)
    uploader.upload(4)
    assert bring(store, tmp_path / "b", 3) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_damaged_one_gives_way_to_the_older(store, tmp_path, damage):  # type: ignore[no-untyped-def]
    uploaded(tmp_path / "a", store, 1, 1, 2)
    number = number_of(store)
    found = read(store, number, 2)
    name = manifest.file_name(2) if damage == "manifest" else found.files[1].name
    content = store.read(number, name, 1 << 20)
    store.remove(number, name)
    if damage != "gone":
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        store.write(number, name, content[:-1] if damage == "cut" else flipped)
    assert bring(store, tmp_path / "b", 2) == 1
    assert loaded_step(tmp_path / "b", 2) == 1
    assert len(lineage.sequences(tmp_path / "b")) == 2  # nothing half fetched stays


def test_what_strangers_put_into_the_store_is_passed_over(store, tmp_path):  # type: ignore[no-untyped-def]
    uploaded(tmp_path / "a", store, 1, 1)
    number = number_of(store)
    store._fs.makedirs(f"{store._root}/x")
    store._fs.pipe_file(f"{store._root}/x/y", b"")
    store.write(number + 5, lineage.START, b'{"a":1}')
    store.write(number, "step-2.json", b"")
    body = unseal(store.read(number, manifest.file_name(1), 1 << 20))
    body |= {"step": 2, "files": [{"name": "../../../out", "bytes": 1, "crc32": 0}]}
    body |= {"chunks": [], "tensors": {}, "aliases": {}}
    store.write(number, manifest.file_name(2), seal(body))
    assert bring(store, tmp_path / "b", 2) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == ["a", "b"]


def test_another_job_goes_on_unless_told_not_to(store, tmp_path):  # type: ignore[no-untyped-def]
    uploaded(tmp_path / "a", store, 1, 7)
    assert bring(store, tmp_path / "b", 1, uid="new", resume=False) is None
    assert bring(store, tmp_path / "b", 1, uid="new") == 7
    uploaded(tmp_path / "b", store, 1, 8, uid="new")
    assert bring(store, tmp_path / "c", 2, uid="new", resume=False) == 8  # its own
    assert bring(store, tmp_path / "d", 2) == 7  # the first goes on alone


def test_what_is_being_uploaded_is_not_taken_away(store, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    disk, uploader = uploaded(tmp_path / "a", store, 1)
    save(disk, 1)
    put = store.put

    def slow(source: Path, number: int, name: str) -> None:
        if not source.exists():
            raise AssertionError("gone")
        if name.endswith("-0.safetensors"):
            save(disk, 2, 3, 4)  # and retention removes step 1
        put(source, number, name)

    monkeypatch.setattr(store, "put", slow)
    uploader.upload(1)
    monkeypatch.undo()
    assert not list((disk.directory / "uploading").iterdir())
    assert bring(store, tmp_path / "b", 2) == 1


def test_it_waits_longer_each_time_and_takes_the_newest_then():  # type: ignore[no-untyped-def]
    clock, done = Clock(), []

    def upload(step: int) -> None:
        if len(waited) < 4:
            raise RuntimeError("the store's own\nexception")
        done.append(step)

    make: Any = lambda: SimpleNamespace(upload=upload)  # noqa: E731
    retries, waited = Retries(make, lambda: clock.now, "s3://b"), []
    assert retries.wait_seconds() is None
    retries.want(5)
    for step in range(6, 10):
        told = retries.attempt()
        assert told is not None
        assert told["text"] == "RuntimeError: the store's own"
        assert retries.attempt() is None  # not yet
        waited.append(retries.wait_seconds())
        retries.want(step)
        clock.wait(waited[-1] or 0)
    assert waited == [1, 2, 4, 8]
    assert retries.attempt() == {"uploaded": 9}
    assert done == [9]


def settings(url: str, root: Path) -> SnapshotSettings:
    return SnapshotSettings(root, 1, 2, resume=True, upload=url)


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_beside_a_rank_and_for_its_successor(url, tmp_path, capfd):  # type: ignore[no-untyped-def]
    counted: list[int | None] = []
    disk, _ = open_snapshots(tmp_path / "a")
    capfd.readouterr()
    uploads = Uploads(settings(url, tmp_path / "a"), disk.sequence, counted.append)
    for step in (1, 2, 3):
        save(disk, step)
        uploads.committed(step)
    uploads.wait(PATIENCE, lambda: None)
    uploads.close()
    assert counted[-1] == 3
    assert capfd.readouterr().err == ""
    identity = Identity("u", 2, 0, unique=True)
    alive: list[int] = []
    fetch_if_newer(settings(url, tmp_path / "b"), identity, lambda: alive.append(1))
    assert len(alive) > 3, "the watchdog hears of bytes that come, and is to find a standstill"
    assert f"fetched the snapshot of step 3 from {url}" in capfd.readouterr().err
    assert loaded_step(tmp_path / "b", 2) == 3
    older = Identity("u", 0, 0, unique=True)
    with pytest.raises(PeerLostError, match="has already started"):
        fetch_if_newer(settings(url, tmp_path / "c"), older, lambda: None)


def test_it_ends_with_its_rank_though_another_holds_its_pipe(tmp_path):  # type: ignore[no-untyped-def]
    order = {"do": "upload", "url": "memory://x", "root": str(tmp_path), "sequence": 1, "keep": 1}
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-m', {client._MODULE!r}])"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as rank:
        rank.stdin.write(json.dumps(order).encode() + b'\n{"step": 1}\n')
        assert b"failed" in rank.stdout.readline()
        rank.kill()
        os.set_blocking(rank.stdout.fileno(), False)
        wait_for(lambda: rank.stdout.read(1 << 16) == b"", "its end")


def test_a_store_that_cannot_be_reached_is_told_and_counted(tmp_path, capfd):  # type: ignore[no-untyped-def]
    (tmp_path / "store").touch()  # a file, so no folder can be made in it
    counted: list[int | None] = []
    disk, _ = open_snapshots(tmp_path / "a")
    given = settings(f"file://{tmp_path}/store", tmp_path / "a")
    uploads = Uploads(given, disk.sequence, counted.append)
    save(disk, 1)
    uploads.committed(1)
    while not counted:
        uploads.hear(5)
    (tmp_path / "store").unlink()
    uploads.wait(PATIENCE, lambda: None)
    uploads.close()
    assert counted[0] is None
    assert counted[-1] == 1
    assert capfd.readouterr().err.count("the snapshot of step 1 was not uploaded: ") == 1


SECRET = "ZqZ/p?w d"
WITH_PASSWORD = f"nothing://user:{SECRET}@host/b"


@pytest.mark.parametrize("quotes", ["{url}", "{url!r} is not there", "bad port: '{secret}@host'"])
def test_no_word_on_a_store_has_its_password(tmp_path, capfd, monkeypatch, quotes):  # type: ignore[no-untyped-def]
    """Neither ours nor that of an exception of a library, in any of its ways out."""
    url, root = WITH_PASSWORD, tmp_path / "a"
    words = quotes.format(url=url, secret=SECRET)

    def fails(*_: object, **__: object) -> Any:
        raise RuntimeError(f"{words}{' ' * 250}{words} cut anywhere")

    said: list[Any] = []
    disk, _ = open_snapshots(root)
    save(disk, 1)
    order = {"url": url, "root": str(root), "identity": asdict(Identity("u", 2, 0, unique=True))}
    with monkeypatch.context() as patch:
        patch.setattr(process, "answer", lambda **about: said.append(about))
        patch.setattr(process, "_FIRST_SECONDS", 0.0)
        patch.setattr(fsspec.core, "url_to_fs", fails)
        process.run_fetch({**order, "resume": True})
        retries = Retries(fails, lambda: 0.0, url)
        retries.want(1)
        said.append(retries.attempt())
        assert cli.main(["evidence", "ls", url]) == 1
        patch.setattr(fsspec.core, "url_to_fs", lambda url: int(words))  # a ValueError
        with pytest.raises(ConfigError) as error:
            Store(url)
        said.append("".join(traceback.format_exception(error.value)))
        patch.setattr(fsspec.core, "url_to_fs", lambda url: (None, "x"))
        said.append(Store(url).url)
    for given in (url.removeprefix("nothing://"), url):
        with pytest.raises(ConfigError) as error:
            check_upload(given, None)
        said.append(str(error.value))
    # The process itself, at the start and beside training.
    with pytest.raises(ConfigError) as error:
        fetch_if_newer(settings(url, tmp_path / "b"), Identity("u", 1, 0, unique=True), lambda: 0)
    said.append(str(error.value))
    uploads = Uploads(settings(url, root), disk.sequence, lambda _: None)
    uploads.committed(1)
    uploads.wait(PATIENCE, lambda: None)
    uploads.close()
    keeper = object.__new__(Keeper)
    env = SimpleNamespace(upload=url, snapshot_dir=root)
    keeper._config = SimpleNamespace(env=env, nproc=1, replica=0, rank=int)  # type: ignore[assignment]
    keeper._say = said.append
    keeper._upload(PATIENCE)
    assert "ConfigError: snapshot_upload='nothing://?***' cannot be used" in said[-1]
    out = capfd.readouterr().err
    assert "was not uploaded: snapshot_upload='nothing://?***' cannot be used" in out
    assert len(said) >= 10
    for text in (out, *map(str, said)):
        assert not re.search("ZqZ|p.w d", text), text


def test_a_restart_in_place_does_not_ask_the_store(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    open_snapshots(tmp_path / "a")
    monkeypatch.setattr(client, "RemoteProcess", None)
    identity = Identity("u", 1, 1, unique=True)
    fetch_if_newer(settings("s3://nowhere", tmp_path / "a"), identity, lambda: None)


def test_what_cannot_be_is_refused_at_once():  # type: ignore[no-untyped-def]
    for url, directory, words in (
        ("/srv/store", "/d", "must be a URL"), ("s3://b/job", None, "needs snapshot_dir"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            check_upload(url, directory)
    with pytest.raises(ConfigError, match="'nothing://x' cannot be used"):
        Store("nothing://x")
