"""A volume shared with strangers: whatever they put there, a start neither waits nor ends by it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpjob_trainer import cli
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import seal
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.retention import retain
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.state.codec import flatten
from support.snapshots import open_snapshots

SECRET = b"a secret of the trainer"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    where = tmp_path / "job"
    store, _ = open_snapshots(where)
    for step in (1, 2):
        store.save(step, flatten({"model": {"w": torch.full((64,), float(step))}, "n": step}), {})
    return where


def loaded_step(root: Path, attempt: int = 2) -> int | None:
    loaded = open_snapshots(root, attempt)[1]
    return None if loaded is None else loaded.step


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end
    except PermissionError:
        pytest.skip("making devices needs root")


THINGS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": bound_socket,
    "device": device,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "directory": Path.mkdir,
    "empty": Path.touch,
    "huge": lambda path: path.touch() or os.truncate(path, 1 << 42),
}


def put(path: Path, thing: str) -> None:
    path.unlink(missing_ok=True)
    THINGS[thing](path)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.fault("S3")
def test_in_place_of_a_manifest_or_of_a_data_file(root, thing):  # type: ignore[no-untyped-def]
    put(root / "00000001" / manifest.file_name(2), thing)
    assert loaded_step(root) == 1
    newest = root / "00000002" / manifest.file_name(1)
    put(newest.parent / manifest.read(newest).files[1].name, thing)
    assert loaded_step(root, 3) == 1  # that of attempt 1


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.fault("S3")
def test_in_place_of_a_start_record(root, thing, capsys):  # type: ignore[no-untyped-def]
    (root / "00000007").mkdir()
    put(root / "00000007" / lineage.START, thing)
    assert loaded_step(root) == 2
    assert "00000007/start.json is not usable" in capsys.readouterr().err
    put(root / "00000001" / lineage.START, thing)
    put(root / "00000003", thing)
    assert loaded_step(root, 3) == 2  # attempt 2 has its own
    retain(root, 8, 2, {1, 2})


@pytest.mark.parametrize("thing", THINGS)
def test_the_tool_tells_them(root, thing, capsys, tmp_path):  # type: ignore[no-untyped-def]
    put(root / "00000001" / manifest.file_name(2), thing)
    put(root / "00000001" / manifest.file_name(3), thing)
    put(root / "00000002", thing)
    assert cli.main(["snapshot", "ls", str(root)]) == 0
    assert capsys.readouterr().out.count("invalid: ") == 2
    assert cli.main(["snapshot", "verify", str(root)]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 2
    (tmp_path / "out.tmp").symlink_to(tmp_path / "precious")
    assert cli.main(["snapshot", "export", str(root), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.fault("S3")
def test_no_byte_from_outside_comes_into_the_volume(root, tmp_path, monkeypatch, links):  # type: ignore[no-untyped-def]
    """A link is named like a data file; making hard links may be forbidden."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    secret = tmp_path / "secret"
    newest = root / "00000001" / manifest.file_name(2)
    file = newest.parent / manifest.read(newest).files[0].name
    secret.write_bytes(SECRET.ljust(file.stat().st_size))
    file.unlink()
    file.symlink_to(secret)
    if not links:
        monkeypatch.setattr(os, "link", forbidden)
    assert loaded_step(root) == 1
    held = [path for path in root.glob("*/*") if path.is_file() and not path.is_symlink()]
    assert not any(SECRET in path.read_bytes() for path in held)


def test_nothing_outside_is_written_or_removed_through_a_linked_directory(root, tmp_path):  # type: ignore[no-untyped-def]
    outside = tmp_path / "outside"
    outside.mkdir()
    names = ["step-000000000001-aa-0.safetensors", manifest.file_name(1), lineage.START]
    for name in names:
        (outside / name).write_bytes(SECRET)
    mine = root / "00000003"
    mine.symlink_to(outside)
    retain(root, 3, 2, {1, 2})
    for action in (
        lambda: disk.write_new(mine / "new", [b""]),
        lambda: lineage.write_start(root, Start(3, "u", 9, 0)),
        lambda: disk.remove(mine / names[0]),
        lambda: disk.link_or_copy(root / "00000001" / lineage.START, mine / "linked"),
        lambda: manifest.listed(mine),
    ):
        with pytest.raises(disk.NotAFileError):
            action()
    assert sorted(path.name for path in outside.iterdir()) == sorted(names)
    assert all((outside / name).read_bytes() == SECRET for name in names)


def test_a_pipe_that_came_after_the_look(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "pipe")
    was = Path(__file__).stat()
    monkeypatch.setattr(os, "stat", lambda *_, **__: was)
    with pytest.raises(disk.NotAFileError):
        disk.open_file(tmp_path / "pipe")
    monkeypatch.undo()


ODD = [
    "0000000²", "٠٠٠٠٠٠٠٩", "00000009\n", "-0000009", "0000000000009", "000000009", "1e000000",
    "step", "0000009 ", "00000000",
]  # fmt: skip


def test_directories_of_odd_names(root):  # type: ignore[no-untyped-def]
    for name in ODD:
        (root / name).mkdir()
        (root / name / lineage.START).write_bytes(seal(asdict(Start(9, "u", 9, 9))))
    assert lineage.sequences(root) == [0, 1]
    assert loaded_step(root) == 2


def test_files_of_odd_names(root):  # type: ignore[no-untyped-def]
    first = root / "00000001"
    for name in (
        "step-2.json", "step-00000000002².json", "step-000000000009.json\n", "step-٣.json", "step-",
        "step-²-n-0.safetensors", "step-9999999999999999.json", "step--1.json", ".json",
    ):  # fmt: skip
        (first / name).write_bytes(b"{}")
    assert [manifest.step_of(path.name) for path in manifest.listed(first)] == [1, 2]
    for step in range(10, 20):  # names alone take no snapshot's place
        (first / manifest.file_name(step)).touch()
    retain(root, 1, 2, {1, 2})
    assert loaded_step(root) == 2
    newest = root / "00000002" / manifest.file_name(2)
    newest.rename(newest.with_name(manifest.file_name(3)))
    assert loaded_step(root, 3) == 2  # that of attempt 1


def test_numbers_of_more_digits_go_on_counting(root):  # type: ignore[no-untyped-def]
    for number in (99_999_999, 100_000_000):
        lineage.directory(root, number).mkdir()
        lineage.write_start(root, Start(number, "before", 1, 0))
    assert lineage.claim(root) == 100_000_001
    assert [loaded_step(root), loaded_step(root, 3)] == [2, 2]


GOOD = asdict(Start(7, "v", 1, 0, 1, 2))


RECORDS: dict[str, Any] = {
    "a list": b"[]",
    "endless": b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "no number": b'{"sequence":NaN}',
    "many digits": b'{"sequence":' + b"9" * 5000 + b"}",
    "half a letter": b'{"uid":"\\ud800"}',
    "no text": b"\xff\xfe",
    "empty": b"",
    "a field more": GOOD | {"more": 1},
    "text for a number": GOOD | {"attempt": "1"},
    "a bool": GOOD | {"round": True},
    "negative": GOOD | {"attempt": -1},
    "huge": GOOD | {"attempt": 10**30},
    "no uid": GOOD | {"uid": None},
    "a long uid": GOOD | {"uid": "x" * 10_000},
    "a number for a list": GOOD | {"predecessors": 7},
    "a text for a list": GOOD | {"predecessors": "ab"},
    "many": GOOD | {"predecessors": ["x"] * 1000},
    "another number": GOOD | {"sequence": 8},
    "deep": GOOD | {"predecessors": [json.loads("[" * 400 + "]" * 400)]},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_start_record_that_says_something_odd(root, name):  # type: ignore[no-untyped-def]
    record = RECORDS[name]
    if isinstance(record, dict):
        record = json.dumps(record).encode()
    digest = hashlib.sha256(record).hexdigest().encode()
    (root / "00000007").mkdir()
    (root / "00000007" / lineage.START).write_bytes(record[:-1] + b',"sha256":"' + digest + b'"}')
    assert loaded_step(root) == 2


def test_parents_in_a_circle(root):  # type: ignore[no-untyped-def]
    for number, parent in ((7, 7), (8, 9), (9, 8)):
        lineage.directory(root, number).mkdir()
        lineage.write_start(root, Start(number, "u", 1, number, parent, 5))
    with pytest.raises(ConfigError, match="00000009 went on from one of step 5"):
        loaded_step(root)
    assert cli.main(["snapshot", "ls", str(root)]) == 0


def test_what_strangers_write_is_printed_on_one_line():  # type: ignore[no-untyped-def]
    text = str(manifest.InvalidSnapshotError("a\nb\x1b[31m" + "x" * 1000))
    assert text.isprintable()
    assert len(text) <= 300


@pytest.mark.parametrize("step", [1, 2])
def test_a_manifest_that_cannot_be_read_now_keeps_its_files(root, monkeypatch, step):  # type: ignore[no-untyped-def]
    real = disk.open_file

    def fails(path: Path) -> Any:
        if path.name == manifest.file_name(step):
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(disk, "open_file", fails)
    retain(root, 1, 2, {1, 2})
    monkeypatch.undo()
    for path in manifest.listed(root / "00000001"):
        load.open_source(path.parent, manifest.read(path))
    assert loaded_step(root) == 2


def test_a_directory_that_vanishes_while_it_is_read(root, monkeypatch):  # type: ignore[no-untyped-def]
    lineage.directory(root, 5).mkdir()
    lineage.write_start(root, Start(5, "u", 1, 5, 1, 2))
    real, gone = disk.names, threading.Event()

    def names(directory: Path) -> list[str]:
        if directory.name == "00000005" and not gone.is_set():
            gone.set()
            shutil.rmtree(directory)
        return real(directory)

    monkeypatch.setattr(disk, "names", names)
    assert loaded_step(root) == 2
    assert gone.is_set()


def test_what_a_user_named_by_a_date_is_not_removed(tmp_path):  # type: ignore[no-untyped-def]
    root = tmp_path / "runs"
    notes = root / "20260101/notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("precious")
    (root / "20260102").mkdir()
    store, _ = open_snapshots(root, keep=1)
    for step in (1, 2):
        store.save(step, flatten({"n": step}), {})
    assert notes.read_text() == "precious"
    assert (root / "20260102").exists()
