"""Which checkpoint a program goes on from, of those that its pattern names."""

import os
import threading
from pathlib import Path

import pytest

from ddpjob_trainer.launcher import workdir
from ddpjob_trainer.launcher.workdir import Checkpoints, matching_checkpoints
from support.patience import PATIENCE


def newest(pattern: str, folder: Path, *, emptied: bool = False) -> str:
    return next((name for *_, name in matching_checkpoints(pattern, folder, emptied=emptied)), "")


def write(path: Path, at: int, content: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (at, at))


@pytest.mark.parametrize(
    ("files", "pattern", "found"),
    [
        ({}, "ck/*.pt", ""),
        ({"ck/b.pt": 5, "ck/a.pt": 7}, "ck/*.pt", "ck/a.pt"),
        # A server's clock may be a second coarse: then the numbers say which is later.
        ({"step-9": 5, "step-10": 5, "step-8": 5}, "step-*", "step-10"),
        ({"out/checkpoint-40/model.bin": 5}, "out/checkpoint-*", "out/checkpoint-40"),
        ({"runs/1/last.pt": 5, "runs/2/deep/last.pt": 6}, "runs/**/last.pt", "runs/2/deep/last.pt"),
        ({"ck/last.pt": 5, "ck/note.txt": 9}, "ck/last.pt", "ck/last.pt"),
    ],
)
def test_the_newest_is_taken(tmp_path, files, pattern, found):
    for name, at in files.items():
        write(tmp_path / name, at)
    assert newest(pattern, tmp_path) == found
    absolute = str(tmp_path / pattern)
    assert newest(absolute, Path("/")) == (found and str(tmp_path / found))


def test_what_is_empty_or_leads_nowhere_is_no_checkpoint(tmp_path):
    write(tmp_path / "ck/1.pt", 5)
    write(tmp_path / "ck/2.pt", 6, "")
    (tmp_path / "ck/3.pt").mkdir()
    (tmp_path / "ck/4.pt").symlink_to("away")
    assert newest("ck/*.pt", tmp_path) == "ck/1.pt"


def test_what_a_restart_removes_is_no_checkpoint(tmp_path):
    write(tmp_path / "work/ck/1.pt", 5)
    write(tmp_path / "claim/2.pt", 4)
    (tmp_path / "work/out").symlink_to(tmp_path / "claim")
    assert newest("*/*.pt", tmp_path / "work") == "ck/1.pt"
    assert newest("*/*.pt", tmp_path / "work", emptied=True) == "out/2.pt"


def test_a_file_server_that_does_not_answer_is_asked_once(monkeypatch):
    answers, asked = threading.Event(), []

    def look(*given: object, **named: object) -> list[object]:
        asked.append(given)
        answers.wait(PATIENCE)
        return [(1, [], (0, 1), "ck/1.pt")]

    monkeypatch.setattr(workdir, "matching_checkpoints", look)
    looked = Checkpoints("ck/*.pt")
    assert [looked.look(), looked.look()] == [None, None]
    answers.set()
    assert (looked.look(), len(asked)) == ("ck/1.pt", 1)
    assert (looked.look(), len(asked)) == ("ck/1.pt", 2), "each time it looks again"
    assert Checkpoints("").look() == ""


def test_a_program_that_fails_from_one_twice_goes_on_from_an_older_one(tmp_path, monkeypatch):
    """The newest may be half written; kills and lost peers say nothing of it."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3):
        write(tmp_path / f"ck/{step}.pt", step)
    looked = Checkpoints("ck/*.pt")
    failures = (False, True, False, False, True, True, True)
    given = [looked.look(failed=failed) for failed in failures]
    assert given == [f"ck/{step}.pt" for step in (3, 3, 3, 3, 2, 2, 1)]
    assert looked.look(failed=True) == "ck/1.pt"
    assert looked.look(failed=True) == "ck/3.pt", "there is no other: the program itself is wrong"
    write(tmp_path / "ck/4.pt", 4)
    assert looked.look(failed=True) == "ck/4.pt"
    assert looked.look(failed=True) == "ck/4.pt", "it got on, and may fail once"


def test_what_an_earlier_run_has_left_is_no_checkpoint_of_this_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ck/5.pt", 5)
    looked = Checkpoints("ck/*.pt")
    assert looked.leave() == "ck/5.pt"
    (tmp_path / "ck/latest.pt").symlink_to("5.pt")
    assert looked.look() == "", "another name of it is nothing new"
    write(tmp_path / "ck/1.pt", 6)
    assert looked.look() == "ck/1.pt"
    write(tmp_path / "ck/5.pt", 7)
    assert Path(looked.look()).resolve().name == "5.pt", "written over by this run"


def test_a_link_to_the_newest_is_no_second_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ck/3.pt", 3)
    write(tmp_path / "ck/4.pt", 4)
    (tmp_path / "ck/latest.pt").symlink_to("4.pt")
    looked = Checkpoints("ck/*.pt")
    given = [looked.look(failed=failed) for failed in (False, True, True)]
    assert [Path(name).resolve().name for name in given] == ["4.pt", "4.pt", "3.pt"]
