"""What a script finds before it starts: its files, its output's folder, its snapshots'."""

import os
import threading
from pathlib import Path

import pytest

import ddpjob_contract as contract
from ddpjob_trainer import cli
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher import workdir


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def mounted(folder: Path) -> Path:
    """A ConfigMap as the kubelet shows it: links into a folder of the newest."""
    held = folder / "..2026_11_27"
    for name in ("train.py", "data/a.txt", ".hidden"):
        (held / name).parent.mkdir(parents=True, exist_ok=True)
        (held / name).write_text(name)
    (held / "train.py").chmod(0o755)
    (folder / "..data").symlink_to(held.name)
    for name in ("train.py", "data", ".hidden"):
        (folder / name).symlink_to(f"..data/{name}")
    return folder


def test_files_are_copied_and_can_be_written(here, tmp_path):
    workdir.fill(mounted(tmp_path / "files"), None, {}, print)
    assert sorted(path.name for path in here.iterdir()) == [".hidden", "data", "train.py"]
    assert not any(path.is_symlink() for path in here.rglob("*"))
    assert (here / "data/a.txt").read_text() == "data/a.txt"
    assert os.access("train.py", os.X_OK)
    (here / "data/new").touch()
    workdir.fill(tmp_path / "files", None, {}, print)  # all of it is there
    with pytest.raises(ConfigError, match=r"--files no: no such folder"):
        workdir.fill(Path("no"), None, {}, print)


def test_a_folder_that_was_empty_is_filled_anew(here, tmp_path):
    """With several launchers: what one rank has saved there, the others' pods do not have."""
    files, env = mounted(tmp_path / "files"), {contract.SNAPSHOT_DIR: f"{tmp_path}/snapshots/job"}
    again = workdir.fill(files, [Path("runs")], env, print, restores=True)
    assert again
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    (here / "checkpoints").mkdir()
    for name in ("checkpoints/7.pt", "data/new", "data/a.txt", "runs/kept", "scratch"):
        (here / name).write_text("of a rank")
    (here / "train.py").unlink()
    (here / ".link").symlink_to(tmp_path)
    (files / ".hidden").write_text("of a later version")
    for _ in range(2):
        again(here / "scratch")
        assert (here / "runs/kept").read_text() == "of a rank"
        found = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
        assert found.pop(here / "scratch") == b"of a rank"
        assert found | {here / "runs/kept": b""} == before | {here / "runs/kept": b""}
        assert {path.name for path in here.iterdir()} == {
            ".hidden", "data", "runs", "scratch", "train.py"
        }  # fmt: skip


def test_somebody_s_folder_is_never_cleared_nor_looked_through(here, tmp_path, monkeypatch):
    """It may be the root of a container, with /proc below, or a claim of a million files."""
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("it is looked through"))
    (here / "mine").touch()
    assert workdir.fill(mounted(tmp_path / "files"), None, {}, print, restores=True) is None
    assert workdir.fill(None, [], {}, print, restores=True) is None


@pytest.mark.parametrize("name", ["train.py", "data/a.txt"])
def test_no_file_is_overwritten(name, here, tmp_path):
    """`local --map /workspace/job=.` with a manifest of yesterday would undo today's work."""
    (here / name).parent.mkdir(exist_ok=True)
    (here / name).write_text("of today")
    with pytest.raises(ConfigError, match=f"{name} is in the working directory already, with ot"):
        workdir.fill(mounted(tmp_path / "files"), None, {}, print)
    assert (here / name).read_text() == "of today"


def test_the_snapshots_folder_is_there_before_the_script(here, tmp_path, capsys):
    (here / "train.sh").write_text('#!/bin/sh\ntest -d "$DDPJOB_SNAPSHOT_DIR"\n')
    (here / "train.sh").chmod(0o755)
    folder = tmp_path / "snapshots/job"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(contract.SNAPSHOT_DIR, str(folder))
        assert cli.main(["run", "./train.sh"]) == 0, capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told_and_no_more(here, tmp_path):
    said: list[str] = []
    (tmp_path / "file").touch()
    for folder in (f"{tmp_path}/file/job", "s3://bucket/job"):
        workdir.fill(None, [], {contract.SNAPSHOT_DIR: folder}, said.append)
    assert len(said) == 1
    assert ": Not a directory; writes to it will fail" in said[0]
    assert list(here.iterdir()) == []


def test_output_is_kept_beside_the_snapshots_or_refused(here, tmp_path):
    env = {contract.SNAPSHOT_DIR: f"{tmp_path}/snapshots/job"}
    for _ in range(2):  # as a launcher finds it that is started again
        workdir.fill(None, [Path("runs/last")], env, print)
    (here / "runs/last/model.pt").write_text("weights")
    assert (tmp_path / "snapshots/job/output/model.pt").read_text() == "weights"
    workdir.fill(None, [Path("logs"), Path("ck/a")], env, print)
    (here / "ck/a/1.pt").write_text("one")
    assert (tmp_path / "snapshots/job/output/ck/a/1.pt").read_text() == "one"
    with pytest.raises(ConfigError, match="--output runs: is here already: name a folder"):
        workdir.fill(None, [Path("runs")], env, print)
    for other in ({}, {contract.SNAPSHOT_DIR: "s3://bucket/job"}):
        with pytest.raises(ConfigError, match=r"needs .DDPJOB_SNAPSHOT_DIR.*give the DDPJob spec"):
            workdir.fill(None, [Path("out")], other, print)


def test_a_full_disk_is_no_fault_of_the_configuration(here, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv(contract.SNAPSHOT_DIR, f"{tmp_path}/file/job")
    assert cli.main(["run", "--output", "out", "true"]) == 1
    assert "the working directory was not made ready: " in capsys.readouterr().err


def test_a_file_server_that_does_not_answer_holds_nothing_up(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(workdir, "_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: answers.wait())
    said: list[str] = []
    workdir.fill(None, [], {contract.SNAPSHOT_DIR: "/snapshots/job"}, said.append)
    answers.set()
    assert len(said) == 1
    assert "could not create /snapshots/job of $DDPJOB_SNAPSHOT_DIR: no answer within" in said[0]
