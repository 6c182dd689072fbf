"""What a launcher shows of rank 0's lines, and that no expression holds it up."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddpjob_contract import OUTPUT
from ddpjob_trainer.environment import read_launcher
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher.launch_config import make_launch_config
from ddpjob_trainer.launcher.output import Log, OutputPump
from ddpjob_trainer.launcher.printed import Reading
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.reports import termination
from ddpjob_trainer.launcher.reports.endpoints import LauncherMetrics, as_text
from ddpjob_trainer.launcher.reports.state import Results, numbers, state_body
from ddpjob_trainer.liveness.heartbeat import RankState


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGVTALRM)
    yield
    signal.signal(signal.SIGVTALRM, before)


def fed(reading: Reading, lines: dict[int, str], now: float = 1.0) -> None:
    pump = OutputPump(Log(), prefixed=True)
    for rank, text in lines.items():
        out, err = pump.pipes(rank)
        os.write(out, text.encode())
        os.close(out)
        os.close(err)
        pump.collect(rank)
    reading.look(pump, now)


def test_lines_of_rank_0_count_and_what_was_recognized_is_said_once():
    said: list[str] = []
    reading = Reading({}, said.append)
    fed(reading, {0: "step 3 loss 0.5\nstep 4/9 loss 0.25\r", 1: "step 7 loss 9\n"})
    assert reading.facts() == {"step": 4, "totalSteps": 9, "loss": 0.25}
    fed(reading, {0: "step 6/9 loss 0.5\n"}, now=2.0)
    assert (reading.facts() or {})["stepsPerSecond"] > 0
    [once] = said
    assert "step in 'step 4/9'" in once
    assert "--read" in once
    reading.begin()
    assert reading.facts() is None


def test_a_program_with_the_library_is_read_by_the_users_expressions_alone():
    ours = Reading({}, print, forms=False)
    fed(ours, {0: "step 3 loss 0.5\n"})
    assert (ours.off, ours.facts()) == (True, None)
    ours = Reading({"metrics": {"acc": r"acc (\S+)"}}, print, forms=False)
    fed(ours, {0: "step 3 loss 0.5 acc 0.75\n"})
    assert (ours.off, ours.facts(), ours.reader.numbers.metrics) == (False, None, {"acc": 0.75})


def test_an_expression_that_would_never_end_is_left_out():
    said: list[str] = []
    reading = Reading({"step": r"it (\d+)", "loss": r"((?:a+)+)$"}, said.append)
    fed(reading, {0: "it 5\n" + "a" * 60 + "b\n"})
    fed(reading, {0: "aaa\nit 6\n"}, now=2.0)
    assert (reading.facts() or {})["step"] == 6
    [warning] = (line for line in said if "warning" in line)
    assert "((?:a+)+)$" in warning


def test_values_that_are_no_numbers_are_left_out():
    assert numbers({"a": 1, "b": "x", "c": float("nan"), "d": [2.0], "e": 0.5}) == {
        "a": 1,
        "e": 0.5,
    }


def test_what_the_library_reports_counts(tmp_path):
    printed = Results(printed={"step": 4, "loss": 0.25})
    body = state_body(None, attempt=1, round_=0, results=printed)
    assert body["printed"] == {"step": 4, "loss": 0.25}
    assert "step" not in body, "what decides reads this"
    made = termination.make_report(None, None, [], round_=0, terminated=False, results=printed)
    assert ("step" not in made, made["printed"]) == (True, {"step": 4, "loss": 0.25})
    body = state_body(RankState(0, "step", step=7), attempt=1, round_=0, results=printed)
    assert ("printed" not in body, body["step"]) == (True, 7)
    printed = replace(printed, values={f"v{n}": 0.5 for n in range(9)})
    made = termination.make_report(None, None, [], round_=0, terminated=False, results=printed)
    assert len(made["metrics"]) == 8
    termination.encode({**made, "metrics": {"x" * 3000: 1.0}})  # comes to an end
    counted = LauncherMetrics()
    counted.printed, counted.value = {"step": 4.0}, lambda: {"accuracy": 0.98}
    assert b'ddpjob_trainer_value{name="accuracy"} 0.98' in as_text(tmp_path, counted)
    assert b'ddpjob_trainer_step{rank="0"} 4.0' in as_text(tmp_path, counted)


@pytest.mark.parametrize(
    ("read", "output"),
    [
        ((), {"loss": "L(.)"}),
        (("step=it (\\d+)", "acc=a=(.)"), {"loss": "L(.)", "step": "it (\\d+)",
                                           "metrics": {"acc": "a=(.)"}}),
        (("never",), {"loss": "L(.)", "forms": "Never"}),
    ],
)  # fmt: skip
def test_options_take_the_place_of_the_jobs(read, output):
    env = read_launcher({OUTPUT: '{"loss": "L(.)"}'})
    program = Program("sh", (), module=False)
    assert make_launch_config(env, program, read=read).output == output


@pytest.mark.parametrize("read", ["step", "step=(", "a b=(.)"])
def test_options_that_cannot_be_are_refused(read):
    with pytest.raises(ConfigError, match="--read"):
        make_launch_config(read_launcher({}), Program("sh", (), module=False), read=[read])
