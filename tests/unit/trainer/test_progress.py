"""What a run publishes as it goes: phases, times, readings, TensorBoard when it is there."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from ddpjob_trainer.liveness.heartbeat import RankState, RankStateWriter, read_state
from ddpjob_trainer.telemetry import progress as progress_module
from ddpjob_trainer.telemetry.event_log import EventLog, read_events
from ddpjob_trainer.telemetry.progress import Progress
from ddpjob_trainer.telemetry.tensorboard import TensorBoard


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):  # type: ignore[no-untyped-def]
    return Clock(monkeypatch)


def make(directory: Path, **options: object) -> Progress:
    defaults: dict[str, object] = {
        "total_steps": 10, "global_batch": 8, "log_every": 2, "samples_per_step": 4,
    }  # fmt: skip
    writer = RankStateWriter(directory, 0)
    return Progress(0, writer, **{**defaults, **options})  # type: ignore[arg-type]


def state(directory: Path) -> RankState:
    found = read_state(directory, 0)
    assert found is not None
    return found


def test_the_first_step_still_belongs_to_the_start(tmp_path, clock, capsys):  # type: ignore[no-untyped-def]
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


def test_every_call_is_a_sign_of_life(tmp_path, clock):  # type: ignore[no-untyped-def]
    progress = make(tmp_path)
    marks = [state(tmp_path).marks]
    for call in (
        lambda: progress.at("data"),
        progress.alive,
        lambda: progress.phase("step"),
        lambda: progress.saved(3),
        lambda: progress.stepped(1, 0.5),
    ):
        call()
        marks.append(state(tmp_path).marks)
    assert sorted(set(marks)) == marks
    progress.at("evaluation")
    progress.alive()
    assert state(tmp_path).activity == "evaluation"


def test_times_and_readings(tmp_path, clock):  # type: ignore[no-untyped-def]
    seen: dict[str, float] = {}
    progress = make(tmp_path, events=EventLog(tmp_path / "events"))
    progress.built(lambda: {"learning_rate": 0.25})
    progress.resumed(0)
    metrics = progress._metrics
    metrics.due = lambda *, force=False: True  # type: ignore[method-assign]
    metrics.add = (  # type: ignore[method-assign]
        lambda name, amount=1.0, label="": seen.update({f"{name}:{label}": amount})
    )
    metrics.set = lambda name, value: seen.update({name: value})  # type: ignore[method-assign]
    for activity, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("body", 8.0)):
        progress.at(activity)  # type: ignore[arg-type]
        clock.now += seconds
    progress.stepped(1, 0.125)
    for activity, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("body", 8.0)):
        assert seen[f"phase_seconds:{activity}"] == seconds
    assert (seen["learning_rate"], seen["loss"], seen["samples:"]) == (0.25, 0.125, 4)
    event = json.loads((tmp_path / "events").read_text().splitlines()[-1])
    assert (event["step"], event["loss"], event["seconds"]) == (1, 0.125, 15.0)


def test_each_step_is_told_once_and_the_rate_is_that_since_the_last_line(tmp_path, clock, capsys):  # type: ignore[no-untyped-def]
    progress = make(tmp_path, events=EventLog(tmp_path / "events"))
    progress.built(dict)
    progress.resumed(0)
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.125)):
        clock.now += step
        progress.stepped(step, loss)
    told = [line for line in read_events(tmp_path / "events") if line["event"] == "step"]
    assert [(line["step"], line["loss"], line["seconds"]) for line in told] == [
        (1, 0.5, 1.0), (2, 0.25, 2.0), (3, 0.125, 3.0),
    ]  # fmt: skip
    assert (state(tmp_path).step, state(tmp_path).loss) == (3, 0.125)
    # 2 steps of 8 samples in 3 s.
    assert capsys.readouterr().out == "step 2/10 loss 0.2500 5 samples/s\n"


def test_tensorboard_is_written_when_it_is_installed(tmp_path, clock, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    calls: list[object] = []

    class SummaryWriter:
        def __init__(self, directory: str, purge_step: int) -> None:
            calls.append((directory, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    progress = make(tmp_path, board=TensorBoard("logs"))
    rates = {"learning_rate": 0.5}
    progress.built(lambda: dict(rates))
    progress.resumed(2)
    clock.now += 2.0
    progress.stepped(3, 9.0)  # no line, no scalars
    progress.stepped(4, 0.75)
    progress.close()
    progress.close()
    assert calls == [
        ("logs", 3), ("loss", 0.75, 4), ("samples_per_second", 8.0, 4), ("learning_rate", 0.5, 4),
        "closed",
    ]  # fmt: skip


def test_without_tensorboard_one_clear_line(tmp_path, clock, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    progress = make(tmp_path, board=TensorBoard("logs"))
    progress.resumed(0)
    progress.stepped(2, 0.5)
    progress.close()
    err = capsys.readouterr().err
    assert err == "ddpjob: no TensorBoard log: the package is missing; pip install tensorboard\n"
