"""The launcher's watch over records: what counts as silence, and the stacks it asks for."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_trainer.launcher import hangs
from ddpjob_trainer.launcher.hangs import HangResponse, HangWatch, StackRequest
from ddpjob_trainer.launcher.hub.messages import LastLine
from ddpjob_trainer.liveness import stacks as stacks_module
from ddpjob_trainer.liveness.hang import Deadlines
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
from support.launching import PATHS
from support.patience import PATIENCE

LIMITS = Deadlines(startup=10, step=10, snapshot=10)
PIDS = {0: 1, 1: 2}


@pytest.fixture
def writers(tmp_path):  # type: ignore[no-untyped-def]
    found = {rank: RankStateWriter(tmp_path, rank) for rank in PIDS}
    for writer in found.values():
        writer.update(phase="step")
    return found


def test_only_the_rank_that_stands_still_is_named(tmp_path, writers):
    watch = HangWatch(LIMITS)
    for second in range(100, 111):
        writers[0].mark("forward", now=0.0)  # the rank's own clock has no say
        assert watch.poll(tmp_path, PIDS, float(second)) is None
    found = watch.poll(tmp_path, PIDS, 111.0)
    assert (found.rank, found.sign.silent) == (1, 11.0)


def test_after_the_loop_only_who_is_stopped_hangs(tmp_path, writers, monkeypatch):
    """The others wait for it in finish(). Only the time that it is stopped counts."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            with monkeypatch.context() as of_the_other:
                of_the_other.setattr(os, "getpid", lambda: process.pid)
                RankStateWriter(tmp_path, 1).update(phase="done")
            writers[0].update(phase="done")
            watch = HangWatch(LIMITS)
            assert [watch.poll(tmp_path, PIDS, 100.0 + s) for s in range(50)] == [None] * 50
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            found = [watch.poll(tmp_path, PIDS, 150.0 + s) for s in range(12)]
        finally:
            process.kill()
    assert found[:10] == [None] * 10
    assert found[10] is not None
    assert (found[10].rank, found[10].phase, found[10].sign.stopped) == (1, "done", True)
    assert "the limit is DDPJOB_HANG_STEP_SECONDS=10" in str(found[10])


def test_who_never_comes_to_start_is_named_once_others_have(tmp_path):
    watch = HangWatch(LIMITS)  # without a record nobody is watched
    assert [watch.poll(tmp_path, PIDS, 100.0 + s) for s in range(50)] == [None] * 50
    watch = HangWatch(LIMITS)
    assert [watch.poll(tmp_path, PIDS, 100.0 + s) for s in range(8)] == [None] * 8
    writer = RankStateWriter(tmp_path, 0)
    writer.mark("rendezvous")
    found = [watch.poll(tmp_path, PIDS, 108.0 + s) for s in range(4)]
    assert found[:3] == [None] * 3
    assert found[3] is not None
    assert (found[3].rank, found[3].phase, found[3].sign.state.activity) == (1, "startup", "start")


def test_that_nobody_comes_to_start_is_a_hang_where_the_source_calls_it(tmp_path):
    """All wait, for the lock of a killed build say. ``starts``: the source calls ddp.start()."""
    for starts, found in ((True, 0), (False, None)):
        watch = HangWatch(LIMITS, starts=starts)
        (tmp_path / "rank-1.pid").unlink(missing_ok=True)
        assert [watch.poll(tmp_path, PIDS, 100.0 + s) for s in range(20)] == [None] * 20
        (tmp_path / "rank-1.pid").write_text("7")  # it has imported the library
        hang = watch.poll(tmp_path, PIDS, 120.0)
        assert (hang.rank if hang else None) == found


def test_a_launcher_that_stood_still_itself_blames_nobody(tmp_path, writers):
    """A laptop that slept, a frozen pod: the workers had no chance either."""
    watch = HangWatch(LIMITS)
    for now in (100.0, 101.0, *(5000.0 + second for second in range(7))):
        assert watch.poll(tmp_path, PIDS, now) is None
    assert any(watch.poll(tmp_path, PIDS, 5007.0 + second) for second in range(6))


_WORKER = """
import ctypes, os, sys, threading, time
from pathlib import Path
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
stacks.enable(Path(sys.argv[1]), int(sys.argv[2]))
RankStateWriter(Path(sys.argv[1]), int(sys.argv[2]))
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def in_c_with_the_gil():
    print("ready", flush=True)
    while True:  # the signal ends a sleep
        ctypes.PyDLL(None).sleep(600)
in_c_with_the_gil()
"""


def _worker(directory: Path, rank: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(directory), str(rank)], stdout=subprocess.PIPE,
        text=True, process_group=0, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


def _answered(request: StackRequest) -> str:
    """A whole answer, however slowly it is written: the script's own frame is the last."""
    deadline = time.monotonic() + PATIENCE
    while "in <module>\n" not in (text := request.text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    return text


def test_stacks_of_all_threads_from_outside_even_while_the_gil_is_held(tmp_path):
    running = [_worker(tmp_path, rank) for rank in (0, 1)]
    try:
        pids = {rank: process.pid for rank, process in enumerate(running)}
        running[0].send_signal(signal.SIGSTOP)
        text = _answered(StackRequest(1, tmp_path, pids))
        assert text.startswith("--- rank 1\n")
        assert "in in_c_with_the_gil" in text
        assert text.count("(most recent call first)") == 2
        assert "--- rank 0\nno answer: it is stopped" in text
        assert running[1].poll() is None  # it lives on
        request = StackRequest(1, tmp_path, pids)
        assert _answered(request).count("in in_c_with_the_gil") == 1  # no more of the first answer
        assert len(request.text(100)) <= 100
    finally:
        for process in running:
            process.kill()
            process.communicate(timeout=PATIENCE)


class Quiet:
    """A launcher's workers, that print when the test says so; its watch over them."""

    def __init__(self, directory: Path, *, leads: bool = True) -> None:
        self.lines = LastLine(leads=leads)
        self.said: list[str] = []
        self.workers: Any = SimpleNamespace(
            state_dir=directory, pids={3: 1, 2: 2}, wrote=0.0, stopping=False, dying=False
        )
        log: Any = SimpleNamespace(say=self.said.append, put=lambda fd, data: None)
        names: Any = SimpleNamespace(begin=lambda: None, trouble="")
        limits = Deadlines(1e6, 1e6, 1e6, output=10)
        self.watch = HangResponse(limits, Counter(), log, names, starts=False)

    def ends(self, *seconds: float) -> bool:
        """Whether a tick in one of these seconds finds a hang."""
        for now in seconds:
            self.watch.tick(self.workers, self.lines, 1e6 + now, terminating=False)
        return bool(self.said)


@pytest.mark.fault("T3")
def test_a_gang_without_a_line_hangs_at_its_limit(tmp_path):
    quiet = Quiet(tmp_path)
    assert not quiet.ends(*range(11))
    quiet.workers.wrote = 1e6 + 10  # any rank
    assert not quiet.ends(*range(11, 21))
    assert quiet.ends(21)
    assert quiet.said[0].startswith("the gang hangs: no rank has printed a line for 11.0 s")
    assert "DDPJOB_HANG_OUTPUT_SECONDS=10" in quiet.said[0]


def test_of_a_silent_gang_the_stopped_rank_is_ended(tmp_path, monkeypatch):
    quiet, ended = Quiet(tmp_path), []
    quiet.workers.mark_hung = lambda rank, why, lines, now: ended.append(rank)
    monkeypatch.setattr(hangs.children, "state", lambda pid: "T" if pid == 1 else "S")
    assert quiet.ends(*range(16))
    assert ended == [3]


def test_what_the_library_counts_is_no_silence(tmp_path):
    quiet, writer = Quiet(tmp_path), RankStateWriter(tmp_path, 2)
    for now in range(100):
        writer.mark("forward")
        assert not quiet.ends(now)
    assert quiet.ends(*range(100, 111))


def test_a_new_round_and_a_launcher_that_was_stopped_begin_again(tmp_path):
    quiet = Quiet(tmp_path)
    assert not quiet.ends(0, 5, 500, 501, 502)
    quiet.watch.begin(1e6 + 503)
    assert not quiet.ends(*range(503, 514))


def test_a_round_whose_workers_start_late_does_not_inherit_silence(tmp_path):
    """A tick before they run, and the next within a second: none of them has been seen yet."""
    quiet = Quiet(tmp_path)
    running, quiet.workers.pids = quiet.workers.pids, {}
    assert not quiet.ends(*range(100))
    quiet.watch.begin(1e6 + 100)
    assert not quiet.ends(100)
    quiet.workers.pids = running
    assert not quiet.ends(100.5, *range(101, 112))
    assert quiet.ends(112)


def test_a_launcher_waits_for_the_hub_to_tell_of_others(tmp_path):
    """Of a hub of the version before, which says nothing, it hears nothing, and ends nobody."""
    quiet = Quiet(tmp_path, leads=False)
    assert not quiet.ends(*range(100))
    quiet.lines.hear(2500, 1e6 + 100)
    assert not quiet.ends(*range(100, 108))
    quiet.lines.hear(0, 1e6 + 108)
    assert not quiet.ends(*range(108, 200))
    quiet.lines.hear(9000, 1e6 + 200)
    assert quiet.ends(200, 201, 202)


def test_a_line_per_thread_for_the_report():
    frames = "".join(
        f'  File "/a b/{name}.py", line {n} in {name}\n' for n, name in enumerate("abc")
    )
    answer = (
        f"Thread 0x7f01 (most recent call first):\n{frames}\n"
        "Thread 0x7f02 (most recent call first):\n  <no Python frame>\n\n"
        'Current thread 0x7f03 (most recent call first):\n  File "/t.py", line 9 in <module>\n'
    )
    assert stacks_module.brief(answer) == [
        "stack: a (a.py:0) < b (b.py:1) < c (c.py:2)",
        "stack: <module> (t.py:9)",
    ]
    assert stacks_module.brief(answer * 9)[-2:] == stacks_module.brief(answer)
    assert len(stacks_module.brief(answer * 9)) == 8
    assert stacks_module.brief("no answer\n") == []


def test_who_cannot_answer_is_not_signalled(tmp_path):
    """Without a handler the signal would end the process."""
    with subprocess.Popen(["sleep", "600"], process_group=0) as process:
        request = StackRequest(1, tmp_path, {1: process.pid})
        told, brief, code = request.text(), request.brief(), process.poll()
        process.kill()
    assert (told, brief, code) == (f"--- rank 1\n{hangs._NONE}\n", [], None)
