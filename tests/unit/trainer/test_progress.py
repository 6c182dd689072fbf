"""What a run publishes as it goes: phases, times, readings, and what the script logs."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.liveness.heartbeat import (
    VALUES,
    RankState,
    RankStateWriter,
    read_report,
    read_state,
)
from ddpjob_trainer.telemetry import progress as progress_module
from ddpjob_trainer.telemetry.event_log import EventLog, read_events
from ddpjob_trainer.telemetry.progress import Progress
from ddpjob_trainer.telemetry.run_log import Log, Pending, Sink, checked


@pytest.fixture
def clock(monkeypatch):  # type: ignore[no-untyped-def]
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: found.now)
    return found


def make(directory: Path, **options: object) -> Progress:
    usual = {"total_steps": 10, "global_batch": 8, "log_every": 2, "samples_per_step": 4}
    return Progress(0, RankStateWriter(directory, 0), **{**usual, **options})  # type: ignore[arg-type]


def state(directory: Path) -> RankState:
    found = read_state(directory, 0)
    assert found is not None
    return found


def test_the_first_step_still_belongs_to_the_start(tmp_path, clock, capsys):
    progress = make(tmp_path)
    progress.built(dict)
    assert (state(tmp_path).phase, state(tmp_path).activity) == ("startup", "load")
    progress.resumed(4)
    progress.phase("snapshot")
    assert state(tmp_path).phase == "snapshot"
    progress.phase("step")
    assert (state(tmp_path).phase, state(tmp_path).step) == ("startup", 4)
    progress.stepped(5, 0.5)
    assert (state(tmp_path).phase, state(tmp_path).step, state(tmp_path).loss) == ("step", 5, 0.5)
    progress.phase("done")
    assert state(tmp_path).activity == "end"


def test_times_and_readings(tmp_path, clock):
    seen: dict[str, float] = {}
    progress = make(tmp_path)
    progress.built(lambda: {"learning_rate": 0.25})
    progress.resumed(0)
    metrics = progress.metrics
    metrics.due = lambda *, force=False: True  # type: ignore[method-assign]
    metrics.add = (  # type: ignore[method-assign]
        lambda name, amount=1.0, label="": seen.update({f"{name}:{label}": amount})
    )
    metrics.set = lambda name, value: seen.update({name: value})  # type: ignore[method-assign]
    spent = {"data": 1.0, "forward": 2.0, "backward": 4.0, "body": 8.0}
    for activity, seconds in spent.items():
        progress.at(activity)  # type: ignore[arg-type]
        clock.now += seconds
    progress.stepped(1, 0.125)
    assert {f"phase_seconds:{activity}": s for activity, s in spent.items()}.items() <= seen.items()
    assert (seen["learning_rate"], seen["loss"], seen["samples:"]) == (0.25, 0.125, 4)


def begun(directory: Path, step: int = 0, **options: object) -> Progress:
    progress = make(directory, **options)
    progress.built(dict)
    progress.resumed(step)
    return progress


def test_each_step_is_told_once_and_the_rate_is_that_since_the_last_line(tmp_path, clock, capsys):
    progress = begun(tmp_path, events=EventLog(tmp_path / "events"))
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.125)):
        clock.now += step
        progress.stepped(step, loss)
    told = [line for line in read_events(tmp_path / "events") if line["event"] == "step"]
    found = [(line["step"], line["loss"], line["seconds"]) for line in told]
    assert found == [(1, 0.5, 1.0), (2, 0.25, 2.0), (3, 0.125, 3.0)]
    assert (state(tmp_path).step, state(tmp_path).loss) == (3, 0.125)
    # 2 steps of 8 samples in 3 s.
    assert capsys.readouterr().out == "step 2/10 loss 0.2500 5 samples/s\n"


class Recorded:
    def __init__(self) -> None:
        self.calls: list[object] = []
        self.sinks = [Sink("recorded", self.open)]

    def open(self, step: int) -> Log:
        self.calls.append(("open", step))
        return lambda step, values: self.calls.append((step, values))


def test_where_lines_are_far_apart_the_rate_is_of_the_last_minutes(tmp_path, clock, capsys):
    progress = begun(tmp_path, log_every=500, total_steps=900)
    rates = []
    for step in range(1, 501):
        clock.now += 1.0 if step <= 250 else 4.0  # it slows down
        progress.stepped(step, 0.5)
        rates.append(state(tmp_path).samples_per_second)
    assert rates[58:60] == [None, 8.0], "after the first minute"
    assert rates[239] == 8.0
    assert rates[-1] == 2.0, "and not the mean of all"
    assert "2 samples/s" in capsys.readouterr().out
    assert len(set(rates[250:300])) > 2


def test_sinks_get_the_runs_numbers_every_few_steps(tmp_path, clock, capsys):
    sink = Recorded()
    progress = make(tmp_path, sinks=sink.sinks)
    rates = {"learning_rate": 0.5}
    progress.built(lambda: dict(rates))
    progress.resumed(2)
    clock.now += 2.0
    progress.stepped(3, 9.0)  # no line, no scalars
    progress.stepped(4, 0.75)
    progress.close()
    progress.close()
    values = {"loss": 0.75, "samples_per_second": 8.0, "learning_rate": 0.5}
    assert sink.calls == [("open", 2), (4, values)]


def test_what_the_script_logs_is_told_when_its_step_has_ended(tmp_path, clock, capsys):
    sink = Recorded()
    events = tmp_path / "events"
    progress = make(tmp_path, sinks=sink.sinks, events=EventLog(events))
    progress.log(0, {"parameters": 12.0})
    progress.built(dict)
    progress.resumed(0)
    progress.log(1, {"accuracy": torch.tensor(0.5), "loss": 7.0})
    assert not [line for line in read_events(events) if line["event"] == "log"]
    clock.now += 1.0
    progress.stepped(1, 1.0)
    told = [(line["step"], line["values"]) for line in read_events(events) if "values" in line]
    assert told == [(0, {"parameters": 12.0}), (1, {"accuracy": 0.5, "loss": 7.0})]
    clock.now += 1.0
    progress.stepped(2, 2.0)
    progress.phase("done")
    progress.log(2, {"final": math.nan})  # after the loop nothing is waited for
    assert list(read_events(events))[-1]["values"] == {"final": "nan"}
    progress.close()
    assert [call[0] for call in sink.calls[1:]] == [0, 1, 2, 2]  # type: ignore[index]
    assert "loss" not in sink.calls[3][1], "the script's own comes first"  # type: ignore[index]


def test_a_resumed_run_does_not_repeat_what_it_logged_before_the_loop(tmp_path, clock, capsys):
    sink = Recorded()
    progress = make(tmp_path, sinks=sink.sinks)
    progress.log(0, {"parameters": 12.0})
    progress.log(9, {"ahead": 1.0})
    progress.resumed(6)
    progress.log(7, {"accuracy": 0.5})
    progress.close()
    assert sink.calls == [("open", 6), (9, {"ahead": 1.0}), (7, {"accuracy": 0.5})]


def test_numbers_of_all_kinds_can_be_logged_and_nothing_else():
    for values, words in (
        ({"x": torch.zeros(2)}, r"'x' is a tensor \[2\] of torch.float32; give one"),
        ({"x": torch.zeros((), dtype=torch.complex64)}, "of torch.complex64"),
        ({"x": "0.5"}, "'x' is a str; give a number"),
        ({3: 0.5}, "names must be strings, not 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            checked(values)  # type: ignore[arg-type]
    total = torch.tensor([1.0])
    found = checked(
        {"a": 1, "b": np.float32(0.5), "c": total, "d": True, "e": 10**30, "f": 10**400}
    )
    total += 1
    pending = Pending()
    pending.begin(0)
    pending.add(1, found)
    wanted = {"a": 1.0, "b": 0.5, "c": 1.0, "d": 1.0, "e": 1e30, "f": float("inf")}
    assert list(pending.take()) == [(1, wanted)]
    assert not list(pending.take())


def test_what_the_script_logs_is_shown_by_the_launcher(tmp_path, clock, capsys):
    progress = begun(tmp_path)
    progress.metrics.due = lambda *, force=False: False  # type: ignore[method-assign]
    progress.log(1, {"accuracy %": 0.5, "bad": math.nan, **{f"n{i}": float(i) for i in range(20)}})
    progress.body_ended()
    progress.metrics.due = lambda *, force=False: True  # type: ignore[method-assign]
    progress.metrics.flush = lambda: None  # type: ignore[method-assign]
    progress.stepped(1, 0.5)
    found = read_report(tmp_path, VALUES)
    assert len(found) == 16
    assert found["accuracy__"] == 0.5
