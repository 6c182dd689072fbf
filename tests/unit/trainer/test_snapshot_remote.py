"""Snapshots in an object store: copied, fenced, kept few, fetched to a fresh disk.

The cases of S3 run where s3fs and moto are installed: in the environment of `make foreign`.
"""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from ddpjob_trainer import cli
from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.launcher.reports.evidence import Keeper
from ddpjob_trainer.snapshot.ondisk import lineage, manifest
from ddpjob_trainer.snapshot.ondisk.disk import seal, unseal
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.reader import read_snapshot
from ddpjob_trainer.snapshot.remote import client, process
from ddpjob_trainer.snapshot.remote.client import Uploads, check_upload, fetch_if_newer
from ddpjob_trainer.snapshot.remote.process import UploadQueue as Retries
from ddpjob_trainer.snapshot.remote.store import Store, file_system
from ddpjob_trainer.snapshot.remote.transfer import Uploader, draw, fetch
from support.patience import PATIENCE, wait_for
from support.snapshots import Clock, loaded_step, open_snapshots, save, saved
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


def uploaded(
    root: Path, store: Store, attempt: int, *steps: int, keep: int = 2, **options: Any
) -> tuple[Disk, Uploader]:
    disk, _ = open_snapshots(root, attempt, keep=keep, **options)
    uploader = Uploader(store, root, disk.sequence, keep, options.get("secret", ""))
    for step in steps:
        save(disk, step)
        uploader.upload(step)
    return disk, uploader


def bring(store: Store, root: Path, attempt: int, *, resume: bool = True, **job: Any) -> Any:
    """Fetch what is newer; return its step, which the attempt goes on from."""
    identity = Identity(**{"uid": "u", "attempt": attempt, "round": 0, "unique": True} | job)
    step = fetch(store, root, identity, resume=resume, tell=print)
    assert step is None or loaded_step(root, attempt, resume=resume, **job) == step
    return step


def test_a_fresh_disk_goes_on_where_the_store_is(store, tmp_path):
    disk, uploader = uploaded(tmp_path / "a", store, 1, 1, 2)
    path = disk.directory / manifest.file_name(2)
    found = manifest.read(path)
    path.write_bytes(replace(found, config={**found.config, "finished": 2}).encode())
    uploader.upload(2)  # marked since
    assert bring(store, tmp_path / "b", 2) == 2
    assert read_snapshot(tmp_path / "b").config == {"seed": 1, "finished": 2}
    assert bring(store, tmp_path / "b", 3) is None  # the disk is newer now
    assert bring(store, tmp_path / "a", 2) is None  # and so it was there
    assert loaded_step(tmp_path / "a", 2) == 2


def test_an_earlier_attempts_disk_takes_the_later_one(store, tmp_path):
    uploaded(tmp_path / "a", store, 1, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    uploaded(tmp_path / "a", store, 2, 5)
    assert bring(store, tmp_path / "b", 3) == 5


@pytest.mark.parametrize("keep", [2, 9])
def test_what_a_zombie_uploads_counts_for_nobody(store, tmp_path, keep):
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


def test_few_stay_however_many_attempts(store, tmp_path):
    for attempt in range(1, 6):
        uploaded(tmp_path / "a", store, attempt, *range(3 * attempt - 2, 3 * attempt + 1))
    (number,) = store.numbers()
    assert lineage.steps(store, number, None) == [14, 15]
    assert sum(name.endswith(".safetensors") for name in store.names(number)) == 2 * 3
    assert bring(store, tmp_path / "b", 9) == 15


@pytest.mark.fault("S8")
def test_the_newest_two_of_each_other_job_stay(store, tmp_path):
    for uid, first in (("a", 100), ("b", 10)):
        uploaded(tmp_path / uid, store, 1, *range(first, first + 5), uid=uid)
    assert [lineage.steps(store, n, None) for n in store.numbers()] == [[103, 104], [13, 14]]


def test_another_job_goes_on_unless_it_is_not_to(store, tmp_path):
    uploaded(tmp_path / "a", store, 1, 7)
    assert bring(store, tmp_path / "b", 1, uid="new", resume=False) is None
    assert bring(store, tmp_path / "b", 1, uid="new") == 7
    uploaded(tmp_path / "b", store, 2, 8, uid="new")
    assert bring(store, tmp_path / "c", 3, uid="new", resume=False) == 8  # its own
    assert bring(store, tmp_path / "d", 2) == 7  # the first goes on alone


def test_numbers_are_drawn_above_all_others_but_a_strangers():
    drawn = {draw([1_500_000]) for _ in range(20)}
    assert len(drawn) >= 19  # of a million numbers: two may be the same
    assert min(drawn) > 1_500_000
    assert draw([1_500_000, 99_999_999_999_999]) < 3_000_000, "there is room above"


def test_a_parent_whose_disk_has_gone_on_is_in_the_store_first(store, tmp_path):
    """The upload begins late: the parent's manifest is no longer on disk."""
    saved(tmp_path / "a", 1)
    later, uploader = uploaded(tmp_path / "a", store, 2)
    save(later, 2, 3, 4)
    uploader.upload(4)
    assert bring(store, tmp_path / "b", 3) == 4


def test_what_is_being_uploaded_is_not_taken_away(store, tmp_path, monkeypatch):
    disk, uploader = uploaded(tmp_path / "a", store, 1)
    save(disk, 1)
    put = store.put

    def slow(source: Path, number: int, name: str) -> None:
        assert source.exists()
        if name.endswith("-0.safetensors"):
            save(disk, 2, 3, 4)  # and retention removes step 1
        put(source, number, name)

    monkeypatch.setattr(store, "put", slow)
    uploader.upload(1)
    assert not list((disk.directory / "uploading").iterdir())
    assert bring(store, tmp_path / "b", 2) == 1


# --- Damage, strangers, newer programs ------------------------------------------------------------


def edited(names: str, change: Callable[[bytes], bytes | None], store: Store, number: int) -> None:
    """Change the files of such names, or remove them."""
    for name in fnmatch.filter(store.names(number), names):
        content = change(store.read(number, name, 1 << 20))
        store.remove(number, name)
        if content is not None:
            store.write(number, name, content)


def resealed(change: Callable[[Any], dict[str, Any]]) -> Callable[[bytes], bytes]:
    return lambda content: seal((body := unseal(content)) | change(body))


def folder(name: str, store: Store, number: int) -> None:
    fs, path = file_system(store.url)
    fs.makedirs(f"{path}/{name}")
    fs.pipe_file(f"{path}/{name}/x", b"")


def strangers(store: Store, number: int) -> None:
    store.write(number + 5, lineage.START, b'{"a":1}')
    store.write(number + 6, lineage.START, seal(asdict(Start(number + 6, "u", 10**9, 0))))
    store.write(number, "step-3.json", b"")
    body = unseal(store.read(number, manifest.file_name(2), 1 << 20))
    body |= {"step": 3, "files": [{"name": "../../../out", "bytes": 1, "crc32": 0}]}
    body |= {"chunks": [], "tensors": {}, "aliases": {}}
    store.write(number, manifest.file_name(3), seal(body))


def row(name: str, harm: object, result: object, foreign: int = 0) -> Any:
    return pytest.param(harm, result, foreign, id=name)


FILE, MANIFEST, MANIFESTS = "*002-*-1.safetensors", manifest.file_name(2), "step-*.json"
flipped = lambda b: b[:-3] + bytes([b[-3] ^ 1]) + b[-2:]  # noqa: E731
gone = lambda _: None  # noqa: E731
terabyte = resealed(lambda m: {"files": [file | {"bytes": 1 << 40} for file in m["files"]]})
later = resealed(lambda _: {"version": manifest.VERSION + 1})
LOST = "there was one, so training does not start over: step 2"
NEWER = "newer ddpjob-trainer"
#: What is done to the snapshots of steps 1 and 2; which is fetched, or why none is.
HARMS = [
    row("a flipped bit", partial(edited, FILE, flipped), 1),
    row("a cut file", partial(edited, FILE, lambda b: b[:-1]), 1),
    row("a file gone", partial(edited, FILE, gone), 1),
    row("a flipped bit of a manifest", partial(edited, MANIFEST, flipped), 1),
    row("a folder of no number", partial(folder, "x"), 2),
    row("a folder of a lower number", partial(folder, "099999999999999"), 2),
    row("a folder of the highest number", partial(folder, "9" * 15), 2, foreign=1),
    row("a folder of 20 digits", partial(folder, "9" * 20), 2, foreign=1),
    row("records and manifests of strangers", strangers, 2),
    row("all data gone", partial(edited, "*.safetensors", gone), LOST),
    row("no start record", partial(edited, "start.*", gone), "no valid start.json, and step 2"),
    row("terabytes", partial(edited, MANIFESTS, terabyte), LOST),
    row("newer manifests", partial(edited, MANIFESTS, later), NEWER),
    row("a newer record", partial(edited, lineage.START, resealed(lambda _: {"more": 1})), NEWER),
]


@pytest.mark.parametrize(("harm", "result", "foreign"), HARMS)
def test_what_is_harmed_in_a_store_gives_way_or_is_missed(
    store, tmp_path, monkeypatch, capsys, harm, result, foreign
):
    """Training never begins from nothing by accident, nor fetches what it cannot use."""
    job: dict[str, Any] = {"secret": b"secret of the job".hex()}
    uploaded(tmp_path / "a", store, 1, 1, 2, **job)
    (number,) = store.numbers()
    harm(store, number)
    if isinstance(result, str):
        monkeypatch.setattr(Store, "pieces", lambda *_: pytest.fail("it is fetched"))
        with pytest.raises(ConfigError, match=result):
            bring(store, tmp_path / "b", 2, **job)
        assert bring(store, tmp_path / "b", 1, uid="new", resume=False) is None
        assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
        return
    assert bring(store, tmp_path / "b", 2, **job) == result
    assert ("foreign folders, such as" in capsys.readouterr().out) == foreign
    uploaded(tmp_path / "b", store, 3, 6, **job)  # it hides nothing of ours
    assert bring(store, tmp_path / "c", 4, **job) == 6
    assert {path.name for path in tmp_path.iterdir()} <= {"a", "b", "c", "store"}


def test_what_the_disk_has_no_room_for_is_not_begun(store, tmp_path, monkeypatch):
    uploaded(tmp_path / "a", store, 1, 1)
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*room[:3], 0, 0, *room[5:10])))
    with pytest.raises(OSError, match="there is room for 0"):
        bring(store, tmp_path / "b", 2)


# --- Its process --------------------------------------------------------------------------------


def test_an_upload_waits_longer_each_time_and_takes_the_newest_then():
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


@contextlib.contextmanager
def uploading(url: str, disk: Disk) -> Iterator[tuple[Uploads, list[int | None]]]:
    """Uploads, and what they count; at the end the newest has arrived."""
    counted: list[int | None] = []
    uploads = Uploads(settings(url, disk.root), disk.sequence, counted.append)
    yield uploads, counted
    uploads.wait(PATIENCE, lambda: None)
    uploads.close()


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_it_uploads_beside_a_rank_and_fetches_for_its_successor(url, tmp_path, capfd):
    disk = saved(tmp_path / "a")
    capfd.readouterr()
    with uploading(url, disk) as (uploads, counted):
        for step in (1, 2, 3):
            save(disk, step)
            uploads.committed(step)
    assert counted[-1] == 3
    assert capfd.readouterr().err == ""
    alive: list[int] = []
    identity = Identity("u", 2, 0, unique=True)
    fetch_if_newer(settings(url, tmp_path / "b"), identity, lambda: alive.append(1))
    assert len(alive) > 3, "the watchdog hears of bytes that come, and is to find a standstill"
    assert f"fetched the snapshot of step 3 from {url}" in capfd.readouterr().err
    assert loaded_step(tmp_path / "b", 2) == 3
    with pytest.raises(PeerLostError, match="has already started"):
        fetch_if_newer(settings(url, tmp_path / "c"), replace(identity, attempt=0), lambda: None)


def test_it_ends_with_its_rank_though_another_holds_its_pipe(tmp_path):
    order = {"do": "upload", "url": "memory://x", "root": str(tmp_path), "sequence": 1, "keep": 1}
    program = "import subprocess, sys; subprocess.run([sys.executable, '-m', sys.argv[1]])"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-c", program, process.__name__], **pipes) as rank:
        rank.stdin.write(json.dumps(order).encode() + b'\n{"step": 1}\n')
        assert b"failed" in rank.stdout.readline()
        rank.kill()
        os.set_blocking(rank.stdout.fileno(), False)
        wait_for(lambda: rank.stdout.read(1 << 16) == b"", "its end")


def test_a_store_that_cannot_be_reached_is_said_and_counted(tmp_path, capfd):
    (tmp_path / "store").touch()  # a file, so no folder can be made in it
    with uploading(f"file://{tmp_path}/store", saved(tmp_path / "a", 1)) as (uploads, counted):
        uploads.committed(1)
        while not counted:
            uploads.receive(5)
        (tmp_path / "store").unlink()
    assert (counted[0], counted[-1]) == (None, 1)
    assert capfd.readouterr().err.count("the snapshot of step 1 was not uploaded: ") == 1


SECRET = "ZqZ/p?w d"
WITH_PASSWORD = f"nothing://user:{SECRET}@host/b"


@pytest.mark.parametrize("quotes", ["{url}", "{url!r} is not there", "bad port: '{secret}@host'"])
def test_no_word_on_a_store_has_its_password(tmp_path, capfd, monkeypatch, quotes):
    """Neither ours nor that of an exception of a library, in any of its ways out."""
    url, root = WITH_PASSWORD, tmp_path / "a"
    words = quotes.format(url=url, secret=SECRET)

    def fails(*_: object, **__: object) -> Any:
        raise RuntimeError(f"{words}{' ' * 250}{words} cut anywhere")

    said: list[Any] = []
    disk = saved(root, 1)
    order = {"url": url, "root": str(root), "identity": asdict(Identity("u", 2, 0, unique=True))}
    with monkeypatch.context() as patch:
        patch.setattr(process, "answer", lambda **about: said.append(about))
        patch.setattr(process.time, "sleep", lambda _: None)
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
    with uploading(url, disk) as (uploads, _):
        uploads.committed(1)
    keeper = object.__new__(Keeper)
    env = SimpleNamespace(upload=url, snapshot_dir=root)
    keeper._config = SimpleNamespace(env=env, nproc=1, replica=0, rank=int)  # type: ignore[assignment]
    keeper._say = said.append
    keeper._upload(PATIENCE)
    assert "ConfigError: snapshots.upload='nothing://?***' cannot be used" in said[-1]
    out = capfd.readouterr().err
    assert "was not uploaded: snapshots.upload='nothing://?***' cannot be used" in out
    assert len(said) >= 10
    for text in (out, *map(str, said)):
        assert not re.search("ZqZ|p.w d", text), text


def test_a_restart_in_place_does_not_ask_the_store(tmp_path, monkeypatch):
    open_snapshots(tmp_path / "a")
    monkeypatch.setattr(client, "RemoteProcess", None)
    identity = Identity("u", 1, 1, unique=True)
    fetch_if_newer(settings("s3://nowhere", tmp_path / "a"), identity, lambda: None)


def test_a_store_that_cannot_be_is_refused_at_once():
    with pytest.raises(ConfigError, match="must be a URL"):
        check_upload("/srv/store", "/d")
    with pytest.raises(ConfigError, match=r"needs snapshots\.directory"):
        check_upload("s3://b/job", None)
    with pytest.raises(ConfigError, match="'nothing://x' cannot be used"):
        Store("nothing://x")
