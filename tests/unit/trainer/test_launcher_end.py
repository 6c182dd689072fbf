"""The launcher's end: nobody is left behind, unless nothing can end it."""

import errno
import json
import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddpjob_trainer.environment import Key
from ddpjob_trainer.gpu import devices
from ddpjob_trainer.launcher.hub.messages import End
from ddpjob_trainer.launcher.local_round import LocalRound, Running
from ddpjob_trainer.launcher.output import Log, OutputPump
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.reports import evidence, termination
from ddpjob_trainer.launcher.reports.state import Results
from ddpjob_trainer.launcher.supervisor import Supervisor
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness.heartbeat import RankStateWriter, path_of
from support.patience import PATIENCE
from support.worker_group import NEVER, config_of_three, make_group


@pytest.fixture
def sent(monkeypatch):  # type: ignore[no-untyped-def]
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(children, "send", lambda pid, signum: found.append((pid, signum)))
    monkeypatch.setattr(children, "reap", list)
    return found


def run_until_nobody(workers: WorkerGroup, now: float) -> float:
    while workers.running:
        due = workers.kill_when_due(now)
        assert due is None or now < due < 100.0 or not workers.running
        now = due or now
    return now


@pytest.mark.parametrize(("device", "seconds"), [("tty0", 10), ("nvidia0", 60)])
def test_a_worker_that_cannot_be_killed_counts_as_gone(
    tmp_path, sent, monkeypatch, device, seconds
):
    (tmp_path / device).touch()
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    workers, said = make_group(tmp_path)
    workers.ended(NEVER + 1, 3, 1.0)
    workers.stop(1.0, last_words=0)
    assert run_until_nobody(workers, 1.0) == pytest.approx(1.0 + seconds, abs=0.1)
    assert {pid for pid, signum in sent if signum == 9} == {NEVER, NEVER + 2}
    found = [(exit_.rank, exit_.status, exit_.ours) for exit_ in workers.exits]
    assert found == [(1, 3, False), (0, -9, True), (2, -9, True)]
    assert said == list(workers.unkillable.values())
    words = f"rank 2 (pid {NEVER + 2}) was killed, but has not ended for {seconds} s"
    assert said[1].startswith(words)


def test_a_spare_that_was_killed_before_it_was_known_is_waited_for(tmp_path, sent, monkeypatch):
    """Else the next round would call it and end with it."""
    workers, _ = make_group(tmp_path)
    for local_rank in range(3):
        workers.ended(NEVER + local_rank, -9, 1.0)
    there = [NEVER + 7]
    monkeypatch.setattr(children, "children", lambda: list(there))
    assert not workers.is_gone(())
    assert sent == [(NEVER + 7, 9)]
    assert not workers.is_gone(there), "it has told its pid, and dies all the same"
    there.clear()
    assert workers.is_gone(())


def test_a_killed_rank_is_why_a_round_ends_and_was_not_stopped_for_it(tmp_path, sent):
    workers, _ = make_group(tmp_path)
    workers.ended(NEVER + 1, -9, 5.0)
    workers.stop(5.0, last_words=0)
    workers.ended(NEVER, -9, 5.1)
    ends = {one.rank: evidence._end(one, 0, workers.kill_at) for one in workers.exits}
    assert ends == {1: "failed", 0: "stopped"}


def test_a_worker_that_hangs_where_it_cannot_be_killed_is_the_cause(tmp_path, sent):
    workers, _ = make_group(tmp_path)
    workers.mark_hung(1, "Hang: rank 1 stands still", [], 5.0)
    assert workers.dying
    due = workers.kill_when_due(5.0)
    assert due == 15.0
    workers.kill_when_due(due)
    assert not workers.dying
    (end,) = workers.exits
    assert (end.rank, end.status, end.exception) == (1, 76, "Hang: rank 1 stands still")
    assert workers.failed


@pytest.mark.parametrize(
    ("status", "counts"), [(1, 0), (3, 0), (-6, 0), (-11, 0), (-9, -9), (143, 143)]
)
def test_an_error_after_the_runs_finish_fails_nothing(tmp_path, sent, status, counts):
    """Unlike the end by somebody else: a round does again what the script does after it."""
    workers, said = make_group(tmp_path)
    writer = RankStateWriter(tmp_path, 1)
    writer.update(phase="done")
    writer.ends("finished")
    writer.failed(ValueError("late"))
    workers.ended(NEVER + 1, status, 1.0)
    assert [(one.status, one.exception) for one in workers.exits] == [(counts, "")]
    assert any("after run.finish()" in line for line in said) == (counts == 0)


@pytest.mark.parametrize("status", [75, 1])
def test_an_end_for_a_drill_is_known_by_its_record_and_its_code(tmp_path, sent, status):
    workers, _ = make_group(tmp_path)
    RankStateWriter(tmp_path, 1).ends("drill")
    workers.ended(NEVER + 1, status, 1.0)
    assert [(one.drill, one.exception) for one in workers.exits] == [(status == 75, "")]


def test_a_code_is_foreign_without_a_record_of_our_library(tmp_path, sent):
    workers, _ = make_group(tmp_path)
    RankStateWriter(tmp_path, 1)
    for rank in (0, 1):
        workers.ended(NEVER + rank, 75, 1.0)
    assert [(one.foreign, one.lost_peer) for one in workers.exits] == [(True, False), (False, True)]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_program_that_resumes_from_checkpoints_may_fail_because_of_them(
    tmp_path, sent, monkeypatch, resumes
):
    """Its newest may be half written and an older one sound, so two failures prove nothing."""
    text = (
        f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 1\nKeyError: 1\n'
    )

    def start(local_rank: int, out: int, err: int) -> int:
        os.write(err, text.encode())
        return NEVER

    config = replace(
        config_of_three(),
        program=Program(f"{tmp_path}/train.py", (), module=False),
        resume_args=("--resume",) * resumes,
    )
    pump = OutputPump(Log(), prefixed=True)
    workers = WorkerGroup(config, Key(1, 0), tmp_path, pump, lambda _: None)
    workers.start(start, 0.0)
    workers.ended(NEVER, 1, 1.0)
    assert [(one.exception, one.in_script) for one in workers.exits] == [
        ("KeyError: 1", not resumes)
    ]


def stopped(tmp_path: Path, status: int) -> WorkerGroup:
    workers, _ = make_group(tmp_path)
    RankStateWriter(tmp_path, 1)  # of our library
    workers.ended(NEVER + 1, status, 1.0)
    workers.stop(1.0, last_words=0)
    run_until_nobody(workers, 1.0)
    return workers


def finish(
    tmp_path: Path, workers: WorkerGroup, ended: termination.Ended, left: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "report"
    pump, said = OutputPump(Log(), prefixed=True), list[str]()
    code = termination.finish(
        config_of_three(report), workers, pump, Results(), ended, left, said.append
    )
    return code, json.loads(report.read_bytes())


@pytest.mark.parametrize("cause", [1, 7])
def test_the_report_names_who_could_not_be_ended(tmp_path, sent, cause):
    """Whether the first failure was here (rank 1) or at another launcher (rank 7)."""
    workers = stopped(tmp_path, 3 if cause == 1 else 75)
    ended = termination.Ended(end=End(cause, "replica 0 did not stop within 5 s", graceful=False))
    code, content = finish(tmp_path, workers, ended, list(workers.unkillable.values()))
    assert code == content["code"] == (3 if cause == 1 else 75)
    where = content["log"] if cause == 1 else [content["exception"]]
    assert any(f"rank 0 (pid {NEVER}) was killed" in line for line in where), content


def test_the_report_names_an_early_end_elsewhere_and_a_signal_in_between(tmp_path, sent):
    ended = termination.Ended(end=End(1, "no", graceful=False, early="rank 7 ended with 0"))
    code, content = finish(tmp_path, stopped(tmp_path, 75), ended)
    assert (code, content["kind"], content["rank"]) == (75, "peerLost", 1)
    assert content["exception"] == "rank 7 ended with 0; then rank 1: 75"
    # The workers of the one round have been stopped, those of the next are not there yet.
    for signum, kind in ((15, "sigterm"), (2, "signal")):
        ended = termination.Ended(signal=signum, between_rounds=True)
        code, content = finish(tmp_path, stopped(tmp_path, 3), ended)
        assert (content["kind"], content["code"], code) == (kind, 128 + signum, 128 + signum)


@pytest.mark.parametrize(
    ("at_work", "phase", "step", "code"),
    [
        (True, None, 0, 143),  # without our library
        (True, "step", 5, 143),
        (True, "done", 5, 143),  # a handler of the script's own has left the loop
        (True, "done", 9, 0),
        (True, "done", 0, 143),  # of an unknown number of steps
        (False, None, 0, 0),
    ],
)
def test_who_ends_with_0_after_a_signal_has_succeeded_only_if_it_was_done(
    tmp_path, sent, at_work, phase, step, code
):
    workers, _ = make_group(tmp_path)
    for rank in range(3):
        if phase:
            RankStateWriter(tmp_path, rank).update(
                phase="done" if rank else phase,
                step=9 if rank else step or 5,
                total_steps=9 if rank or step else 0,
            )
        workers.ended(NEVER + rank, 0, 1.0)
    found, content = finish(tmp_path, workers, termination.Ended(signal=15, at_work=at_work))
    assert (found, content["kind"]) == (code, "sigterm" if code else "success")


def test_who_cannot_be_killed_is_not_waited_for(monkeypatch, sent):
    """A process in a read from a disk that does not answer."""
    asked = 0

    def living() -> list[int]:
        nonlocal asked
        asked += 1
        if asked > 10_000:
            pytest.fail("waits for ever")
        return [NEVER, NEVER + 1]

    monkeypatch.setattr(children, "children", living)
    nobody = lambda pid, status: None  # noqa: E731
    assert children.end_all(nobody, 0.05, ()) == [NEVER, NEVER + 1]
    asked = 9_999  # those of whom it is known are not waited for at all
    assert children.end_all(nobody, 600.0, (NEVER, NEVER + 1)) == [NEVER, NEVER + 1]
    zombies = [NEVER]  # ended while the launcher stood still
    monkeypatch.setattr(children, "children", lambda: list(zombies))
    monkeypatch.setattr(children, "reap", lambda: [(zombies.pop(), -9)] if zombies else [])
    reaped: list[tuple[int, int]] = []
    assert children.end_all(lambda *one: reaped.append(one), -1.0, ()) == []
    assert reaped == [(NEVER, -9)]


def test_without_descriptors_a_worker_cannot_start_and_none_leaks(tmp_path, monkeypatch):
    """A failure like any other: the next round may have some."""
    pump, said = OutputPump(Log(), prefixed=True), list[str]()
    workers = WorkerGroup(config_of_three(), Key(1, 0), tmp_path, pump, said.append)
    real, made = os.pipe2, list[tuple[int, int]]()

    def second_fails(flags: int) -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(real(flags))
        return made[0]

    monkeypatch.setattr(os, "pipe2", second_fails)
    workers.start(lambda *_: pytest.fail("it cannot"), 0.0)
    assert workers.failed
    (words,) = said
    assert words.endswith("sh: Too many open files")
    assert words in workers.exits[0].exception
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0][1])


@pytest.mark.parametrize("how", ["signal", "stop", "grace"])
def test_who_has_not_come_yet_is_not_waited_for(tmp_path, sent, how):
    """The fork server may import for seconds: a SIGTERM, or another rank's failure, comes first."""
    workers, _ = make_group(tmp_path, start=lambda local_rank: None if local_rank else NEVER)
    if how == "signal":
        workers.signal(15, 1.0)
        assert (sent, workers.running) == ([(NEVER, 15)], 1)
    workers.ended(NEVER, 3, 1.0)
    if how == "grace":
        workers.kill_by(2.0)
        assert (workers.kill_when_due(1.0), workers.running) == (2.0, 2)
        workers.kill_when_due(2.0)
    elif how == "stop":
        workers.stop(1.0, last_words=0)
    status = -15 if how == "signal" else -9
    found = sorted((exit_.rank, exit_.status, exit_.ours) for exit_ in workers.exits)
    ours = how == "stop"
    assert (found, workers.running) == ([(0, 3, False), (1, status, ours), (2, status, ours)], 0)


@pytest.mark.parametrize("pid", [0, 1, 2**32 - 1])
def test_a_record_that_names_another_process_misleads_no_signal(tmp_path, sent, pid):
    workers, _ = make_group(tmp_path)
    RankStateWriter(tmp_path, 1)
    with path_of(tmp_path, 1).open("r+b") as record:
        record.seek(4)
        record.write(pid.to_bytes(4, "little"))
    workers.signal(15, 1.0)
    assert sent == [(NEVER, 15), (NEVER + 1, 15), (NEVER + 2, 15)]


def test_a_failure_heard_of_is_older_than_an_end_seen_after_it(monkeypatch):
    """Else a victim here would be the first, and blamed."""
    heard, seen = list[float](), list[float]()

    def ended(pid: int, status: int, at: float) -> None:
        seen.append(at)
        raise StopIteration  # so far

    supervisor: Any = object.__new__(Supervisor)
    supervisor._sleep = lambda seconds: heard.append(time.monotonic())
    supervisor._phase = SimpleNamespace(round=SimpleNamespace(workers=SimpleNamespace(ended=ended)))
    supervisor._starter = SimpleNamespace(hand_over=lambda now: None)
    monkeypatch.setattr(children, "reap", lambda: [(NEVER, 1)])
    with pytest.raises(StopIteration):
        supervisor._watch()
    assert heard[0] <= seen[0]


@pytest.mark.parametrize("again", [True, False])
def test_a_long_restore_of_the_working_directory_silences_no_link(tmp_path, again):
    """Before a round that follows another one here."""
    did, ticked = list[str](), Event()
    supervisor: Any = object.__new__(Supervisor)
    supervisor._hangs = supervisor._evidence = supervisor._pump = supervisor._summary = Mock()
    supervisor._reading = supervisor._connections = Mock()
    supervisor._config = Mock(env=Mock(trace=None, drill="Never"))
    supervisor._member = Mock(rounds=False, tick=lambda now: ticked.set())
    supervisor._selector = selectors.DefaultSelector()
    supervisor._runtime_dir = Mock(path=tmp_path)
    supervisor._starter = Mock(begin=lambda *given: did.append("begin"))
    supervisor._ended = termination.Ended()
    supervisor._round = lambda key: Mock()
    supervisor._refill = lambda path: did.append(f"restored {ticked.wait(PATIENCE)}")
    supervisor._begin(Key(5, 3), 101.0, again=again)
    supervisor._selector.close()
    assert did == ["restored True"] * again + ["begin"]


def test_who_loses_peers_after_an_end_elsewhere_waits_out_no_grace_period(tmp_path, sent):
    workers, _ = make_group(tmp_path)
    nobody: Any = None
    ended = termination.Ended(end=End(-1, "replica 1 leaves", graceful=True))
    phase = Running(LocalRound(config_of_three(), workers, nobody, ended, nobody), 0.0)
    phase.stop_the_rest(1.0)
    assert not workers.stopping
    workers.ended(NEVER, 75, 2.0)
    phase.stop_the_rest(2.0)
    assert (workers.stopping, workers.kill_at) == (True, 3.0)


def test_who_saves_the_newest_step_has_no_longer_than_a_signal_gives(tmp_path, sent):
    workers, _ = make_group(tmp_path)
    workers.end_all_but(workers.pids, 0.0, 30.0, first_word_by=2.0)
    workers.kill_when_due(1.0)
    assert sent == []
    workers.first_word_by = None  # they have said it
    workers.kill_by(5.0)  # near the end of the grace period of a SIGTERM
    workers.kill_when_due(4.0)
    assert sent == []
    workers.kill_when_due(5.0)
    assert sent == [(NEVER + n, signal.SIGKILL) for n in range(workers.running)] != []


def test_who_says_no_first_word_is_killed(tmp_path, sent):
    workers, _ = make_group(tmp_path)
    workers.end_all_but(workers.pids, 0.0, 30.0, first_word_by=2.0)
    workers.kill_when_due(2.0)
    assert (workers.kill_at, len(sent)) == (2.0, workers.running)
