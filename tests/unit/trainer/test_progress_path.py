"""What counts as the newest file at a progress path; nobody waits for a dead file server."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpjob_trainer.launcher.reports import progress_path
from ddpjob_trainer.launcher.reports.progress_path import NEVER, ProgressPath, newest_mtime
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


def test_nothing_there(tmp_path: Path):
    assert newest_mtime(tmp_path / "missing") == NEVER
    assert newest_mtime(tmp_path / "missing-*") == NEVER
    assert newest_mtime(tmp_path / "missing" / "*") == NEVER
    assert newest_mtime(tmp_path) == NEVER, "a directory made by a start is no progress"
    assert newest_mtime(Path("/etc/passwd/x")) == NEVER


def test_a_file_and_a_link_to_one(tmp_path: Path, touch: Callable[[str, int], Path]):
    path = touch("last.ckpt", 7)
    assert newest_mtime(path) == 7 * SECOND
    (tmp_path / "link").symlink_to(path)
    assert newest_mtime(tmp_path / "link") == 7 * SECOND, "what was declared is followed"


def test_the_newest_file_of_a_directory_down_to_three_levels(
    tmp_path: Path, touch: Callable[[str, int], Path]
):
    touch("a", 1)
    touch("b/c/d", 5)
    touch("b/e", 4)
    touch("b/c/f/too-deep", 9)
    assert newest_mtime(tmp_path) == 5 * SECOND


def test_a_pattern_leaves_out_what_every_start_writes(
    tmp_path: Path, touch: Callable[[str, int], Path]
):
    touch("checkpoint-5/model", 5)
    touch("checkpoint-10/model", 6)
    touch("my-checkpoint-11/model", 7)
    touch("checkpoint-5.tmp/model", 8)
    touch("runs/events", 9)
    touch("[ab]", 1)
    touch("a", 2)
    assert newest_mtime(tmp_path / "check*-*0") == 6 * SECOND
    assert newest_mtime(tmp_path / "*t-5") == 5 * SECOND
    assert newest_mtime(tmp_path / "*") == 9 * SECOND
    assert newest_mtime(tmp_path / "[ab]*") == 1 * SECOND, "only * is a sign"


def test_links_below_are_not_followed(
    tmp_path: Path, touch: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "new").touch()
    os.utime(elsewhere / "new", ns=(0, 99 * SECOND))
    touch("old", 1)
    for name, target in (("out", elsewhere), ("file", elsewhere / "new"), ("loop", tmp_path)):
        (tmp_path / name).symlink_to(target)
        os.utime(tmp_path / name, ns=(0, 2 * SECOND), follow_symlinks=False)
    assert newest_mtime(tmp_path) == 2 * SECOND, "of the links themselves: last -> step-5 is news"


def test_what_is_no_file_is_not_opened(tmp_path: Path, touch: Callable[[str, int], Path]):
    touch("old", 1)
    os.mkfifo(tmp_path / "pipe")
    assert newest_mtime(tmp_path) == 1 * SECOND
    assert newest_mtime(tmp_path / "pipe") == NEVER


def test_a_large_directory_is_looked_at_in_part_the_newest_parts_first(
    tmp_path: Path, touch: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
):
    for number in range(20):
        touch(f"many/{number}", 1)
    touch("fresh/new", 5)
    os.utime(tmp_path / "many", ns=(0, 2 * SECOND))
    os.utime(tmp_path / "fresh", ns=(0, 5 * SECOND))
    monkeypatch.setattr(progress_path, "MOST_ENTRIES", 10)
    assert newest_mtime(tmp_path) == 5 * SECOND


def test_times_that_nobody_can_write_down_are_left_out(
    tmp_path: Path, touch: Callable[[str, int], Path]
):
    touch("before", -5)
    assert newest_mtime(tmp_path) == NEVER
    late = touch("late", 10**10).stat().st_mtime_ns  # unless the file system bounds it itself
    assert newest_mtime(tmp_path) == (NEVER if late >= 2**63 else late)
    assert newest_mtime(tmp_path / "late") == newest_mtime(tmp_path)


def test_a_newer_file_is_seen_and_an_older_one_takes_nothing_back(
    touch: Callable[[str, int], Path],
):
    path = touch("last", 5)
    watched = ProgressPath(path, every=60)
    watched.poll(PATIENCE)
    assert watched.newest == 5 * SECOND
    touch("last", 8)
    watched.poll(PATIENCE)
    assert watched.newest == 8 * SECOND
    path.unlink()
    touch("last", 3)
    watched.poll(PATIENCE)
    assert watched.newest == 8 * SECOND


def test_it_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch):
    looks = threading.Semaphore(0)

    def look(path: Path) -> int:
        seen.append(path)
        looks.release()
        if len(seen) == 5:
            threading.Event().wait()
        return NEVER

    seen: list[Path] = []
    monkeypatch.setattr(progress_path, "newest_mtime", look)
    monkeypatch.setattr(progress_path, "_SHARE", 1e9)  # else it rests after a slow look
    ProgressPath(Path("x"), every=0.001)
    assert all(looks.acquire(timeout=PATIENCE) for _ in range(5))


def test_a_file_server_that_does_not_answer_stops_nobody(monkeypatch: pytest.MonkeyPatch):
    begun, answers = threading.Semaphore(0), threading.Semaphore(0)
    looks = itertools.count(1)

    def look(path: Path) -> int:
        begun.release()
        answers.acquire(timeout=PATIENCE)
        return next(looks)

    monkeypatch.setattr(progress_path, "newest_mtime", look)
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


def test_without_a_path_nothing_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "Thread", None)
    nothing = ProgressPath(None)
    nothing.poll(30)
    assert nothing.newest == NEVER
