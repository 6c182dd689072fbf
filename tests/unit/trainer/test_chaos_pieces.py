"""Chaos without processes: the plan of kills, fail points, records, the verdict."""

import itertools
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddpjob_tools import chaos, cli
from ddpjob_tools.chaos import Result
from ddpjob_tools.prove import compare
from ddpjob_tools.prove.disturb import Disturbance, Pace
from ddpjob_tools.prove.kill import LAUNCHER, SIGNALS, STARTING, Kill, plan_kills
from ddpjob_tools.prove.record import RankStory, Records, open_gate
from ddpjob_tools.prove.run import ProofError
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.failpoints import GATE, OPEN, POINTS
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.replay import records as recording
from ddpjob_trainer.training.replay.records import Recorder

PACE = Pace(total_steps=40, epoch=8, every=5, step_seconds=0.01, start_seconds=1.0)


def planned(seed: int = 1, count: int = 12, **more: Any) -> list[Kill]:
    given = {"nproc": 4, "total_steps": 60, "epoch": 0, "every": 5, **more}
    return plan_kills(seed=seed, count=count, **given)


@pytest.mark.parametrize("seed", range(20))
def test_what_every_plan_holds(seed):
    kills = planned(seed)
    assert planned(seed) == kills != planned(seed + 1)
    assert [kill.number for kill in kills] == list(range(1, 13))
    assert {kill.signal for kill in kills} == set(SIGNALS)
    assert {kill.victim for kill in kills} == {LAUNCHER, 0, 1, 2, 3}
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    kills = planned(seed, count=30)
    assert not kills[0].restarting
    for before, kill in itertools.pairwise(kills):
        if kill.restarting:
            assert before.ends, "it causes a restart"
        assert kill.restarting or kill.point not in STARTING
        if kill.signal == signal.SIGSTOP and (kill.victim == LAUNCHER or kill.restarting):
            assert kill.resumes, "nobody would notice"
        if kill.point:
            assert kill.victim != LAUNCHER
    # Check 8 of gpu-check: one kill more than ranks meets each of them.
    kills = planned(seed, 4, nproc=3, total_steps=26, epoch=21, every=3, points=())
    assert {kill.victim for kill in kills} >= {0, 1, 2}


def test_all_points_are_in_reach_and_many_kills_come_while_restarting():
    kills = [kill for seed in range(30) for kill in planned(seed)]
    assert {kill.point for kill in kills} == {*POINTS, ""}
    assert sum(kill.restarting and not kill.point for kill in kills) > len(kills) / 20
    assert sum(not kill.restarting and not kill.point for kill in kills) > len(kills) / 4
    given = {"nproc": 3, "total_steps": 20, "signals": [signal.SIGTERM], "points": ["step"]}
    kills = planned(count=10, **given)
    assert {kill.signal for kill in kills} == {signal.SIGTERM}
    assert {kill.point for kill in kills} == {"", "step"}
    assert len(planned(count=59)) == 59
    with pytest.raises(ConfigError, match="at least 61 steps, the script makes 60: lower --kills"):
        planned(count=60)


@pytest.mark.parametrize(
    ("total", "epoch", "first"),
    [(60, 0, 46), (60, 10, 46), (60, 48, 53), (60, 60, 46), (60, 58, 59), (8, 0, 7), (2, 0, 1)],
)
def test_one_kill_comes_late_after_the_first_epoch_and_ends_the_gang(total, epoch, first):
    """It goes on from a snapshot that holds what has switched until then."""
    for seed, count in itertools.product(range(10), (1, 2, 12)):
        kills = planned(seed, min(count, total - 1), total_steps=total, epoch=epoch)
        (late,) = (kill for kill in kills if kill.saved)
        assert first <= late.step <= max(first, total - 4)
        assert late.ends
        assert late.victim != LAUNCHER
        assert (late.point, late.restarting) == ("", False)


UNCOMMITTED = {"parameters": "aa", "weights": "ee"}
END = {**UNCOMMITTED, "buffers": "bb", "generators": "cc", "registered optimizer": "dd"}


def write(directory: Path, rank: int, *events: dict[str, object], torn: bytes = b"") -> None:
    path = directory / f"rank-{rank}.jsonl"
    with path.open("ab") as file:
        for event in events:
            file.write(json.dumps({"at": 1.0, **event}).encode() + b"\n")
        file.write(torn)


def step(number: int, *losses: str) -> dict[str, object]:
    return {"event": "step", "step": number, "losses": losses}


def start(attempt: int, number: int, after: int, epoch: int | None = None) -> list[dict[str, Any]]:
    first = {"event": "start", "attempt": attempt, "round": number, "pid": 5}
    return [first, {"event": "resume", "step": after, "epoch": epoch}]


def run_of(
    directory: Path,
    end: dict[str, str] | None = None,
    second: str = "0x1p1",
    more: Sequence[dict[str, object]] = (),
) -> Records:
    """Two ranks that make two steps; ``more``: of rank 0."""
    directory.mkdir()
    ended = {"event": "end", "hashes": end or END}
    for rank in range(2):
        steps = (step(1, "0x1p0"), step(2, second))
        write(directory, rank, *start(1, 0, 0, epoch=3), *steps, ended)
    write(directory, 0, *more)
    records = Records(directory, 2)
    records.look()
    return records


def hashes(calm: Records, wild: Records) -> list[str]:
    return [compare.sha256(records.stories, calm.stories) for records in (calm, wild)]


def test_equal_runs_are_identical_also_when_steps_were_replayed(tmp_path):
    calm, wild = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    write(tmp_path / "b", 1, torn=b'{"event": "st')
    write(tmp_path / "b", 1, torn=b"\n")
    again = [*start(2, 0, 1), step(2, "0x1p1"), {"event": "end", "hashes": END}]
    write(tmp_path / "b", 1, *again)
    wild.look()
    assert wild.incarnation == (2, 0)
    assert not wild.together(), "rank 0 is of an older incarnation"
    assert wild.restarts() == [1]
    assert compare.differences(calm.stories, wild.stories) == []
    assert hashes(calm, wild)[0] == hashes(calm, wild)[1]
    wild.stories[1].hashes.clear()
    assert "rank 1 never finished" in compare.differences(calm.stories, wild.stories)


TOLD = {"event": "told", "step": 2, "what": "evaluate()", "values": {"": "0x1p0"}}
VALUES = ["rank 0: 1 values of evaluate() differ, the first after step 2"]


def of_both(words: str) -> list[str]:
    return [f"rank {rank}: {words}" for rank in range(2)]


def end(**parts: str) -> dict[str, Any]:
    return {"end": {**END, **parts}}


@pytest.mark.parametrize(
    ("undisturbed", "disturbed", "found"),
    [
        ({}, end(parameters="other"), of_both("parameters differ")),
        ({}, end(**{"own head": "other"}), of_both("own head differs")),
        # DDP overwrites those of other ranks with rank 0's before use.
        ({}, end(buffers="other"), ["rank 0: buffers differ"]),
        # Shown as the script knows them, and compared by their parts.
        ({}, end(weights="other"), []),
        (
            {}, {"second": "0x1.0000000000001p1"},
            of_both("1 losses differ, the first after step 2"),
        ),
        # A replay, though the end is equal.
        ({}, {"more": [step(2, "0x1p9")]}, ["rank 0: 1 losses differ, the first after step 2"]),
        # An earlier end.
        (
            {}, {"end": {"parameters": "aa"}},
            ["rank 0: buffers differ"] + [
                f"rank {rank}: {part}" for rank in range(2)
                for part in ("generators differ", "registered optimizer differs")
            ],
        ),
        # Left before a commit: a restart finds the snapshot of the step before, whole.
        ({"end": UNCOMMITTED}, end(weights="ff"), []),
        ({"end": UNCOMMITTED}, end(parameters="other"), of_both("parameters differ")),
        # What an evaluation has found; again in a step that is replayed.
        ({"more": [TOLD]}, {"more": [TOLD] * 2}, []),
        ({"more": [TOLD]}, {"more": [{**TOLD, "values": {"": "0x1p1"}}] * 2}, VALUES),
        ({"more": [TOLD]}, {}, VALUES),
    ],
)  # fmt: skip
def test_any_part_that_differs_is_named(tmp_path, undisturbed, disturbed, found):
    calm, wild = run_of(tmp_path / "a", **undisturbed), run_of(tmp_path / "b", **disturbed)
    assert compare.weights(calm.stories) == "ee"
    assert compare.differences(calm.stories, wild.stories) == found
    one, other = hashes(calm, wild)
    assert (one == other) == (not found)


def recorded(directory: Path, state: TrainingState, *, committed: bool) -> RankStory:
    recorder = Recorder(directory, 0)
    recorder.logged(3, "evaluate()", {"loss": 0.5, "hits": 2})
    recorder.ended(state, committed=committed)
    records = Records(directory, 1)
    records.look()
    assert records.ended()
    return records.stories[0]


def test_a_rank_at_its_end_stands_there_until_every_kill_was_made(tmp_path, monkeypatch):
    """However many steps it has made: early or late is a difference, and no reason to miss it."""
    open_gate(tmp_path / GATE, 5)
    gates = iter((10, 10, OPEN))
    monkeypatch.setattr(recording.time, "sleep", lambda _: open_gate(tmp_path / GATE, next(gates)))
    story = recorded(tmp_path, TrainingState(nn.Linear(2, 2)), committed=False)
    assert list(gates) == []
    assert story.hashes[0].keys() == {"parameters", "weights"}


@pytest.mark.parametrize(
    ("restarts", "differences", "every", "code", "said"),
    [
        ([5, None, 35], [], 5, 0, "identical"),
        ([5], ["rank 0: parameters differ"], 5, 1, "DIFFERENT"),
        ([0], ["rank 0: parameters differ"], 5, 1, "DIFFERENT"),
        ([], [], 5, 3, "of 0 restarts none went on from a snapshot"),
        ([0, None], [], 5, 3, "of 2 restarts none went on from a snapshot"),
        ([0], [], 40, 3, "every 40 steps, and the run has 40: lower --every"),
    ],
)
def test_equal_bits_show_nothing_unless_a_restart_went_on_from_a_snapshot(
    restarts, differences, every, code, said, tmp_path, monkeypatch, capsys
):
    pace = replace(PACE, every=every)
    result = Result([], 1, restarts, pace, "aa", "aa", differences)
    monkeypatch.setattr(chaos, "prove", lambda *_: result)
    report = tmp_path / "report.json"
    words = ["chaos", "--nproc", "3", "--keep", str(tmp_path / "kept"), "--json", str(report), "x"]
    assert cli.main(words) == code
    told = json.loads(report.read_text())
    last = capsys.readouterr().out.splitlines()[-1]
    assert said in last
    assert (last == "identical") == (code == 0) == told["identical"]
    assert (told["verdict"], told["restarts"]) == (last, restarts)


def test_launches_that_reach_the_end_but_make_no_step_are_given_up(tmp_path):
    """A script that fails after its loop, say by a name that only the loop's body sets."""

    class Job:
        attempt, exit_code = 0, 1

        def running(self) -> bool:
            return False

        def start(self) -> None:
            self.attempt += 1
            assert self.attempt < 20, "launched for ever"
            with (tmp_path / "rank-0.jsonl").open("a") as file:
                file.write(json.dumps({"event": "end", "at": self.attempt, "hashes": {}}) + "\n")

    job: Any = Job()
    run = Disturbance(job, Records(tmp_path, 1), tmp_path, Pace(9, 0, 5, 0.1, 1.0), 60.0, print)
    with pytest.raises(ProofError, match=r"launches in a row made no new step \(exit code 1\)"):
        run._until(lambda: False, "training ended")


def test_bad_options_end_with_64(capsys):
    for arguments, complaint in (
        ("--nproc 0 x", "--nproc=0 must be at least 1"),
        ("--nproc 3 --kills 0 x", "--kills=0 must be at least 1"),
        ("--nproc 3 missing.py", "missing.py: no such script"),
        ("--nproc 3 --patience 0 x", "--patience=0.0 must be more"),
        ("--nproc 3 --patience nan x", "--patience=nan must be more"),
        ("--nproc 1000000 x", "--nproc=1000000 must be at most 1024"),
    ):
        assert cli.main(["chaos", *arguments.split()]) == 64
        assert complaint in capsys.readouterr().err
