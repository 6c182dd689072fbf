"""What counts as the newest file at a progress path; nobody waits for a dead file server."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpjob_trainer.launcher.reports import state
from ddpjob_trainer.launcher.reports.state import NEVER, ProgressPath, newest_mtime
from support.patience import PATIENCE

SECOND = 10**9


@pytest.fixture
def touch(tmp_path: Path) -> Callable[[str, int], Path]:
    def make(name: str, seconds: int) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, ns=(0, seconds * SECOND))
        return path

    return make


@pytest.mark.parametrize(
    ("path", "seconds"),
    [
        ("missing", None),
        ("missing-*", None),
        ("missing/*", None),
        ("empty", None),  # a directory made by a start is no progress
        ("last/x", None),
        ("last", 7),
        ("link", 7),  # what was declared is followed
        ("deep", 5),  # down to three levels
        ("pipe", None),
        ("old", None),  # before 1970
        ("check*-*0", 6),
        ("*t-5", 5),
        ("*ist", 3),
        ("[ab]*", 1),  # only * is a sign
        ("links", 2),  # of the links themselves: last -> step-5 is news
    ],
)
def test_the_newest_file_counts(path, seconds, tmp_path, touch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(touch("last", 7))
    for name, age in {
        "deep/a": 1, "deep/b/c/d": 5, "deep/b/e": 4, "deep/b/c/f/too-deep": 9, "old": -5,
        "checkpoint-5/model": 5, "checkpoint-10/model": 6, "my-checkpoint-11/model": 7,
        "checkpoint-5.tmp/model": 8, "[ab]": 1, "a": 2, "links/old": 1, ".list": 3,
    }.items():  # fmt: skip
        touch(name, age)
    os.mkfifo(tmp_path / "pipe")
    for name, target in (("out", "deep"), ("file", "last"), ("loop", "links")):
        (tmp_path / "links" / name).symlink_to(tmp_path / target)
        os.utime(tmp_path / "links" / name, ns=(0, 2 * SECOND), follow_symlinks=False)
    assert newest_mtime(tmp_path / path) == (NEVER if seconds is None else seconds * SECOND)


def test_a_large_directory_is_looked_at_in_part_the_newest_parts_first(
    tmp_path, touch, monkeypatch
):
    for number in range(20):
        touch(f"many/{number}", 1)
    touch("fresh/new", 5)
    os.utime(tmp_path / "many", ns=(0, 2 * SECOND))
    os.utime(tmp_path / "fresh", ns=(0, 5 * SECOND))
    monkeypatch.setattr(state, "MOST_ENTRIES", 10)
    assert newest_mtime(tmp_path) == 5 * SECOND


def test_a_newer_file_is_seen_and_an_older_one_takes_nothing_back(touch, monkeypatch):
    path = touch("last", 5)
    watched = ProgressPath(path, every=60)
    monkeypatch.setattr(threading, "Thread", None)  # at the limit of pids no other can be started
    nothing = ProgressPath(None)
    nothing.poll(30)
    assert nothing.newest == NEVER
    watched.poll(PATIENCE)
    assert watched.newest == 5 * SECOND
    touch("last", 8)
    watched.poll(PATIENCE)
    assert watched.newest == 8 * SECOND
    path.unlink()
    touch("last", 3)
    watched.poll(PATIENCE)
    assert watched.newest == 8 * SECOND


def test_a_file_server_that_does_not_answer_stops_nobody(monkeypatch):
    begun, answers = threading.Semaphore(0), threading.Semaphore(0)
    looks = itertools.count(1)

    def look(path: Path) -> int:
        begun.release()
        answers.acquire(timeout=PATIENCE)
        return next(looks)

    monkeypatch.setattr(state, "newest_mtime", look)
    watched = ProgressPath(Path("x"))
    assert begun.acquire(timeout=PATIENCE)
    watched.poll(0.01)
    assert watched.newest == NEVER
    waits = threading.Thread(target=watched.poll, args=[PATIENCE])
    waits.start()
    answers.release()
    assert begun.acquire(timeout=PATIENCE)
    waits.join(0.2)
    assert waits.is_alive(), "a look that had begun before does not count"
    answers.release(9)
    waits.join(PATIENCE)
    assert watched.newest >= 2
