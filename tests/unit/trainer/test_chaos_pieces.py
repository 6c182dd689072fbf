"""Chaos without processes: the plan of kills, fail points, records, the verdict."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpjob_tools.chaos import command, compare
from ddpjob_tools.chaos.disturbance import ChaosError, Disturbance, Made, Pace
from ddpjob_tools.chaos.experiment import Result
from ddpjob_tools.chaos.job import environment_of_job
from ddpjob_tools.chaos.kills import LAUNCHER, SIGNALS, STARTING, Kill, plan_kills
from ddpjob_tools.chaos.records import Records, open_gate
from ddpjob_trainer import cli, failpoints
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.failpoints import GATE, OPEN, POINTS
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.replay import recorder as recording
from ddpjob_trainer.training.replay.recorder import Recorder


def planned(
    seed: int = 1, count: int = 12, nproc: int = 4, total_steps: int = 60, epoch: int = 0
) -> list[Kill]:
    return plan_kills(
        seed=seed, count=count, nproc=nproc, total_steps=total_steps, epoch=epoch, every=5
    )


# --- The plan ---------------------------------------------------------------------------------


def test_a_seed_always_draws_the_same_kills_and_another_seed_others() -> None:
    assert planned(seed=7) == planned(seed=7)
    assert planned(seed=7) != planned(seed=8)


@pytest.mark.parametrize("seed", range(20))
def test_every_dozen_has_all_signals_rank_0_and_the_launcher(seed: int) -> None:
    kills = planned(seed)
    assert len(kills) == 12
    assert [kill.number for kill in kills] == list(range(1, 13))
    assert {kill.signal for kill in kills} == set(SIGNALS)
    assert {kill.victim for kill in kills} == {LAUNCHER, 0, 1, 2, 3}
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)


def test_all_points_are_in_reach_and_many_kills_come_while_restarting() -> None:
    kills = [kill for seed in range(30) for kill in planned(seed)]
    assert {kill.point for kill in kills} == {*POINTS, ""}
    assert sum(kill.restarting and not kill.point for kill in kills) > len(kills) / 20
    assert sum(not kill.restarting and not kill.point for kill in kills) > len(kills) / 4


@pytest.mark.parametrize("seed", range(20))
def test_what_only_a_restart_reaches_follows_a_kill_that_causes_one(seed: int) -> None:
    kills = planned(seed, count=30)
    assert not kills[0].restarting
    for before, kill in itertools.pairwise(kills):
        if kill.restarting:
            assert before.ends
        assert kill.restarting or kill.point not in STARTING
        if kill.signal == signal.SIGSTOP and (kill.victim == LAUNCHER or kill.restarting):
            assert kill.resumes, "nobody would notice"
        if kill.point:
            assert kill.victim != LAUNCHER


def test_only_the_chosen_signals_and_points() -> None:
    kills = plan_kills(
        seed=1, count=10, nproc=3, total_steps=20, epoch=0, every=5, signals=[signal.SIGTERM],
        points=["step"],
    )  # fmt: skip
    assert {kill.signal for kill in kills} == {signal.SIGTERM}
    assert {kill.point for kill in kills} == {"", "step"}


def test_more_kills_than_steps_are_refused_with_the_cure() -> None:
    assert len(planned(count=59)) == 59
    with pytest.raises(ConfigError, match="at least 61 steps, the script makes 60: lower --kills"):
        planned(count=60)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("total", "epoch", "first"),
    [(60, 0, 46), (60, 10, 46), (60, 48, 53), (60, 60, 46), (60, 58, 59), (8, 0, 7), (2, 0, 1)],
)
@pytest.mark.parametrize("count", [1, 2, 12])
def test_one_kill_comes_late_after_the_first_epoch_and_ends_the_gang(
    seed: int, total: int, epoch: int, first: int, count: int
) -> None:
    """It goes on from a snapshot that holds what has switched until then."""
    kills = planned(seed, min(count, total - 1), total_steps=total, epoch=epoch)
    (late,) = (kill for kill in kills if kill.saved)
    assert first <= late.step <= max(first, total - 4)
    assert late.ends
    assert late.victim != LAUNCHER
    assert (late.point, late.restarting) == ("", False)


# --- Fail points ------------------------------------------------------------------------------


@pytest.fixture
def armed(tmp_path: Path):  # type: ignore[no-untyped-def]
    received: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda signum, _: received.append(signum))

    def arm(**order: object) -> list[int]:
        whole = {"number": 3, "point": "step", "rank": 1, "hits": 1, **order}
        (tmp_path / "armed").write_text(json.dumps({**whole, "signal": signal.SIGUSR1}))
        return received

    failpoints.configure(tmp_path, 1)
    yield arm
    failpoints.configure(None, failpoints.NO_RANK)
    signal.signal(signal.SIGUSR1, old)


def test_a_point_fires_once_for_its_rank_at_its_hit(armed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    received = armed(hits=2)
    failpoints.reach("load")
    failpoints.reach("step")
    assert received == []
    assert failpoints.fired(tmp_path, 3) is None
    failpoints.reach("step")
    failpoints.reach("step")
    assert received == [signal.SIGUSR1]
    found = failpoints.fired(tmp_path, 3)
    assert found is not None
    assert found[0] == os.getpid()


def test_a_point_of_another_rank_does_not_fire_and_that_of_any_rank_does(armed) -> None:  # type: ignore[no-untyped-def]
    received = armed(rank=0)
    failpoints.reach("step")
    assert received == []
    received = armed(rank=None)
    failpoints.reach("step")
    assert received == [signal.SIGUSR1]


# --- Records and the verdict ------------------------------------------------------------------

END = {"parameters": "aa", "buffers": "bb", "generators": "cc", "registered optimizer": "dd"}
END |= {"weights": "ee"}


def write(directory: Path, rank: int, *events: dict[str, object], torn: bytes = b"") -> None:
    path = directory / f"rank-{rank}.jsonl"
    with path.open("ab") as file:
        for event in events:
            file.write(json.dumps({"at": 1.0, **event}).encode() + b"\n")
        file.write(torn)


def run_of(
    directory: Path, losses: dict[int, str] | None = None, end: dict[str, str] | None = None
) -> Records:
    directory.mkdir()
    for rank in range(2):
        start = {"event": "start", "attempt": 1, "round": 0, "pid": 5, "total_steps": 3}
        write(directory, rank, start, {"event": "resume", "step": 0, "epoch": 3})
        for step, loss in (losses or {1: "0x1p0", 2: "0x1p1"}).items():
            write(directory, rank, {"event": "step", "step": step, "losses": [loss]})
        write(directory, rank, {"event": "end", "hashes": end or END})
    records = Records(directory, 2)
    records.look()
    return records


def hashes(calm: Records, wild: Records) -> list[str]:
    return [compare.sha256(records.stories, calm.stories) for records in (calm, wild)]


def test_equal_runs_are_identical_also_when_steps_were_replayed(tmp_path: Path) -> None:
    calm, wild = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    write(tmp_path / "b", 1, torn=b'{"event": "st')
    write(tmp_path / "b", 1, torn=b"\n")
    write(
        tmp_path / "b", 1,
        {"event": "start", "attempt": 2, "round": 0, "pid": 6},
        {"event": "resume", "step": 1, "epoch": None},
        {"event": "step", "step": 2, "losses": ["0x1p1"]},
        {"event": "end", "hashes": END},
    )  # fmt: skip
    wild.look()
    assert wild.incarnation == (2, 0)
    assert not wild.together(), "rank 0 is of an older incarnation"
    assert wild.restarts() == [1]
    assert compare.differences(calm.stories, wild.stories) == []
    assert hashes(calm, wild)[0] == hashes(calm, wild)[1]


BOTH = ("rank 0: ", "rank 1: ")


@pytest.mark.parametrize(
    ("losses", "end", "found"),
    [
        (None, {"parameters": "other"}, [f"{rank}parameters differ" for rank in BOTH]),
        (None, {"generators": "other"}, [f"{rank}generators differ" for rank in BOTH]),
        (None, {"own head": "other"}, [f"{rank}own head differs" for rank in BOTH]),
        # DDP overwrites those of other ranks with rank 0's before use.
        (None, {"buffers": "other"}, ["rank 0: buffers differ"]),
        # Shown as the script knows them, and compared by their parts.
        (None, {"weights": "other"}, []),
        (
            {1: "0x1p0", 2: "0x1.0000000000001p1"}, {},
            [f"{rank}1 losses differ, the first after step 2" for rank in BOTH],
        ),
    ],
)  # fmt: skip
def test_any_part_that_differs_is_named(tmp_path: Path, losses, end, found) -> None:  # type: ignore[no-untyped-def]
    calm = run_of(tmp_path / "a")
    wild = run_of(tmp_path / "b", losses=losses, end={**END, **end})
    assert compare.weights(calm.stories) == "ee"
    assert compare.differences(calm.stories, wild.stories) == found
    one, other = hashes(calm, wild)
    assert (one == other) == (not found)


def test_an_earlier_end_is_a_difference(tmp_path: Path) -> None:
    calm, wild = run_of(tmp_path / "a"), run_of(tmp_path / "b", end={"parameters": "aa"})
    assert "rank 0: buffers differ" in compare.differences(calm.stories, wild.stories)


@pytest.mark.parametrize(("parameters", "equal"), [("aa", True), ("other", False)])
def test_a_loop_left_before_a_commit_is_compared_by_its_parameters(
    tmp_path: Path, parameters: str, equal: bool
) -> None:
    """A restart after it finds the snapshot of the step before, whole."""
    calm = run_of(tmp_path / "a", end={"parameters": "aa", "weights": "ee"})
    wild = run_of(tmp_path / "b", end={**END, "parameters": parameters, "weights": "ff"})
    found = compare.differences(calm.stories, wild.stories)
    assert found == ([] if equal else [f"rank {rank}: parameters differ" for rank in range(2)])
    assert (hashes(calm, wild)[0] == hashes(calm, wild)[1]) == equal


def test_what_each_rank_has_for_itself_is_recorded_too(tmp_path: Path) -> None:
    open_gate(tmp_path / GATE, OPEN)
    state = TrainingState(nn.Linear(2, 2))
    state.register("all", {"best": 1.0})
    state.register("each", {"hidden": torch.ones(2)}, per_rank=True)
    recorder = Recorder(tmp_path, 0)
    recorder.told(3, "evaluate()", {"loss": 0.5, "hits": 2})
    recorder.ended(state)
    records = Records(tmp_path, 1)
    records.look()
    (story,) = records.stories
    assert {"parameters", "registered all", "own each"} <= story.hashes[0].keys()
    two, half = "0x1.0000000000000p+1", "0x1.0000000000000p-1"
    assert story.told == {(3, "evaluate()"): {json.dumps({"hits": two, "loss": half})}}


def test_a_rank_that_is_at_its_end_stands_there_until_every_kill_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps it has made: early or late is a difference, and no reason to miss it."""
    open_gate(tmp_path / GATE, 5)
    stood: list[float] = []

    def sleep(seconds: float) -> None:
        stood.append(seconds)
        open_gate(tmp_path / GATE, 10 if len(stood) < 3 else OPEN)

    monkeypatch.setattr(recording.time, "sleep", sleep)
    Recorder(tmp_path, 0).ended(TrainingState(nn.Linear(2, 2)), committed=False)
    assert len(stood) == 3
    records = Records(tmp_path, 1)
    records.look()
    assert records.ended()
    assert records.stories[0].hashes[0].keys() == {"parameters", "weights"}


@pytest.mark.parametrize(
    ("values", "equal"), [({"": "0x1p0"}, True), ({"": "0x1p1"}, False), (None, False)]
)
def test_what_an_evaluation_has_found_is_compared(
    tmp_path: Path, values: dict[str, str] | None, equal: bool
) -> None:
    calm, wild = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    told = {"event": "told", "step": 2, "what": "evaluate()", "values": {"": "0x1p0"}}
    write(tmp_path / "a", 0, told)
    for again in [values] * 2 if values is not None else []:  # in a step that is replayed
        write(tmp_path / "b", 0, {**told, "values": again})
    calm.look()
    wild.look()
    words = "rank 0: 1 values of evaluate() differ, the first after step 2"
    assert compare.differences(calm.stories, wild.stories) == ([] if equal else [words])
    assert len(set(hashes(calm, wild))) == (1 if equal else 2)


def test_a_replay_that_differs_is_a_difference_even_when_the_end_is_equal(tmp_path: Path) -> None:
    calm, wild = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    write(tmp_path / "b", 0, {"event": "step", "step": 2, "losses": ["0x1p9"]})
    wild.look()
    assert "rank 0: 1 losses differ" in compare.differences(calm.stories, wild.stories)[0]


def test_a_rank_that_never_finished_is_a_difference(tmp_path: Path) -> None:
    calm, wild = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    wild.stories[1].hashes.clear()
    assert "rank 1 never finished" in compare.differences(calm.stories, wild.stories)


def test_a_restart_goes_on_after_the_step_before_its_first(tmp_path: Path) -> None:
    records = run_of(tmp_path / "a")
    places = [(1, 1, 20), (1, 2, None), (2, 0, 0), (3, 0, 35)]
    for attempt, number, after in places:
        for rank in range(2):
            write(
                tmp_path / "a", rank,
                {"event": "start", "attempt": attempt, "round": number, "pid": 5},
                {"event": "resume", "step": after or 0, "epoch": None},
            )  # fmt: skip
        if after is not None:  # the other was killed before
            write(tmp_path / "a", 1, {"event": "step", "step": after + 1, "losses": []})
            write(tmp_path / "a", 1, {"event": "step", "step": after + 2, "losses": []})
    records.look()
    assert records.restarts() == [20, None, 0, 35]


# --- The verdict ------------------------------------------------------------------------------


def result_of(
    restarts: list[int | None], differences: list[str] | None = None, every: int = 5
) -> Result:
    pace = Pace(total_steps=40, epoch=8, every=every, step_seconds=0.01, start_seconds=1.0)
    return Result([], 1, restarts, pace, "aa", "aa", differences or [])


@pytest.mark.parametrize(
    ("result", "code", "said"),
    [
        (result_of([5, None, 35]), 0, "identical"),
        (result_of([5], ["rank 0: parameters differ"]), 1, "DIFFERENT"),
        (result_of([0], ["rank 0: parameters differ"]), 1, "DIFFERENT"),
        (result_of([]), 3, "of 0 restarts none went on from a snapshot"),
        (result_of([0, None]), 3, "of 2 restarts none went on from a snapshot"),
        (result_of([0], every=40), 3, "every 40 steps, and the run has 40: lower --every"),
    ],
)
def test_equal_bits_show_nothing_unless_a_restart_went_on_from_a_snapshot(  # type: ignore[no-untyped-def]
    result, code, said, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(command, "run", lambda *_: result)
    report = tmp_path / "report.json"
    words = ["chaos", "--nproc", "3", "--keep", str(tmp_path / "kept"), "--json", str(report), "x"]
    assert cli.main(words) == code
    told = json.loads(report.read_text())
    last = capsys.readouterr().out.splitlines()[-1]
    assert said in last
    assert (last == "identical") == (code == 0) == told["identical"]
    assert (told["verdict"], told["restarts"]) == (last, result.restarts)


# --- The command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--nproc", "0", "x"), "--nproc=0 must be at least 1"),
        (("--nproc", "3", "--kills", "0", "x"), "--kills=0 must be at least 1"),
        (("--nproc", "3", "missing.py"), "missing.py: no such script"),
        (("--nproc", "3", "--patience", "0", "x"), "--patience=0.0 must be more"),
        (("--nproc", "3", "--patience", "nan", "x"), "--patience=nan must be more"),
        (("--nproc", "1000000", "x"), "--nproc=1000000 must be at most 1024"),
    ],
)
def test_bad_options_end_with_64(arguments, complaint, capsys) -> None:  # type: ignore[no-untyped-def]
    assert cli.main(["chaos", *arguments]) == 64
    assert complaint in capsys.readouterr().err


def test_a_jobs_variables_do_not_leak_into_the_runs(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "RANK": "3", "DDPJOB_REPLICA": "1", "MASTER_ADDR": "x"}
    found = environment_of_job(base, tmp_path, "u", 5, 7.5)
    assert found.keys() & base.keys() == {"PATH"}
    assert found["DDPJOB_SNAPSHOT_DIR"] == str(tmp_path / "snapshots")
    assert found["DDPJOB_HANG_STEP_SECONDS"] == "7.5"


def test_kills_read_well() -> None:
    kill = planned()[0]
    plain = replace(kill, step=4, victim=2, signal=signal.SIGKILL, point="", restarting=False)
    assert str(plain) == "step 4            SIGKILL rank 2"
    assert str(replace(plain, point="snapshot")).endswith("SIGKILL the writer at snapshot")
    assert str(replace(plain, victim=LAUNCHER)).endswith("SIGKILL the launcher")


@pytest.mark.parametrize("restarting", [False, True])
@pytest.mark.parametrize(("sent", "room"), [(signal.SIGTERM, 3), (signal.SIGKILL, 0)])
def test_no_gang_that_was_told_to_stop_waits_at_the_gate(tmp_path, sent, room, restarting):  # type: ignore[no-untyped-def]
    """It ends the step after the next at the latest."""
    watch = SimpleNamespace(step=30)
    pace = Pace(total_steps=100, epoch=0, every=20, step_seconds=0.01, start_seconds=1.0)
    driver = Disturbance(None, watch, tmp_path, pace, 60.0, print)  # type: ignore[arg-type]
    kill = replace(planned()[0], step=30, signal=sent, point="", restarting=False, resumes=False)
    following = replace(kill, step=31, restarting=restarting)
    driver._aftermath(Made(kill, 0.0, 1, (1, 0), [], 0), following)
    driver._limit(following)
    gate = int.from_bytes((tmp_path / GATE).read_bytes(), "little")
    assert gate >= watch.step + room
    assert gate <= watch.step + room + 4


def at_the_end(directory: Path, say: Callable[[str], None] = print) -> Disturbance:
    """A gang of two whose ranks have made all 10 steps."""
    for rank in range(2):
        lines = [{"event": "start", "at": 1.0, "attempt": 1, "round": 0, "pid": 100 + rank}]
        lines += [{"event": "step", "at": 2.0, "step": n, "losses": []} for n in range(1, 11)]
        lines += [{"event": "end", "at": 3.0, "hashes": END}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"rank-{rank}.jsonl").write_text(text)
    pace = Pace(total_steps=10, epoch=0, every=5, step_seconds=0.01, start_seconds=1.0)
    ended = SimpleNamespace(
        launch=lambda: None, running=lambda: False, exit_code=0, attempt=1, pid=0
    )
    records = Records(directory, 2)
    records.look()
    return Disturbance(ended, records, directory, pace, 5.0, say)  # type: ignore[arg-type]


def test_a_kill_comes_to_a_gang_that_has_ended_before_its_step(tmp_path: Path) -> None:
    """An early end is a difference, to be told as such."""
    at_the_end(tmp_path)._await(replace(planned()[0], step=15, point="", restarting=False))


def test_an_end_that_no_gate_could_hold_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match="training ended before"):
        at_the_end(tmp_path).run([planned()[0]])


@pytest.mark.parametrize(("total", "held_at"), [(100, 10), (9, 8)])
def test_the_late_kill_waits_for_the_snapshot_before_it(
    tmp_path: Path, total: int, held_at: int
) -> None:
    """And it comes before the last step: a restart must have one to make."""
    driver = at_the_end(tmp_path)
    driver.pace = replace(driver.pace, total_steps=total)
    kill = replace(planned()[0], step=8, point="", restarting=False, saved=True)
    looks: list[int] = []

    def look() -> None:
        """The writer is slow; in another incarnation's directory a later one may lie."""
        gate = int.from_bytes((tmp_path / GATE).read_bytes(), "little")
        looks.append(gate)
        for name in ("01/step-000000000000", "00/step-000000000009"):
            path = tmp_path / f"snapshots/{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if len(looks) > 5:
            (tmp_path / "snapshots/01/step-000000000005.json").touch()

    for story in driver.records.stories:
        story.step = 3
    driver.records.look = look  # type: ignore[method-assign]
    driver.job.running = lambda: True  # type: ignore[method-assign]
    driver._await(kill)
    assert driver._newest_snapshot() == 5
    assert looks[:6] == [8] * 6, "it stands after step 8"
    assert int.from_bytes((tmp_path / GATE).read_bytes(), "little") == held_at


def test_a_gang_told_to_stop_at_its_last_step_has_survived(tmp_path: Path) -> None:
    driver = at_the_end(tmp_path)
    kill = replace(planned()[0], step=9, victim=0, signal=signal.SIGTERM, point="", resumes=False)
    made = Made(kill, 0.0, 1, (1, 0), [10, 10], 100)
    driver.made.append(made)
    assert driver._how(made) == "went on"
    assert driver._how(replace(made, kill=replace(kill, signal=signal.SIGKILL))) == ""
    assert driver._how(replace(made, kill=replace(kill, point="barrier"))) == ""


def test_the_gate_is_narrow_again_once_a_gang_that_was_told_to_stop_is_back(tmp_path: Path) -> None:
    """Else the late kill finds a gang that has ended."""
    driver = at_the_end(tmp_path)
    kill = replace(planned()[0], step=4, victim=0, signal=signal.SIGTERM, point="", resumes=False)
    made = Made(kill, 0.0, 1, (1, 0), [10, 10], 100)
    driver.made.append(made)
    driver._aftermath(made, replace(kill, saved=True))
    driver._return(made)
    for story in driver.records.stories:
        story.step = 7
    driver._open(8)
    assert int.from_bytes((tmp_path / GATE).read_bytes(), "little") == 8


def test_the_gate_holds_the_last_step_until_the_barrier_is_armed(tmp_path: Path) -> None:
    driver = at_the_end(tmp_path)
    driver._limit(replace(planned()[0], step=10, point="barrier"))
    assert int.from_bytes((tmp_path / GATE).read_bytes(), "little") == 10
