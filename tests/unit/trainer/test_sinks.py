"""Sinks: slow and failing ones, one curve over resumes, a function of the script's own."""

from __future__ import annotations

import json
import math
import sys
import threading
import types
from collections.abc import Mapping

import pytest

from ddpjob_trainer.telemetry import sinks as sinks_module
from ddpjob_trainer.telemetry.run_log import packed, unpacked
from ddpjob_trainer.telemetry.sinks import Called, Sink, Sinks
from ddpjob_trainer.telemetry.tensorboard import TensorBoard
from support.patience import PATIENCE


class Fake:
    """A sink that fails, or stands still, as told."""

    def __init__(self, *, failures: int = 0, opens: int = 0) -> None:
        self.rows: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self._failures = failures
        self._opens = opens

    def open(self, step: int) -> None:
        if self._opens:
            self._opens -= 1
            raise OSError("no route to it")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.go.wait(PATIENCE)
        if self._failures:
            self._failures -= 1
            raise RuntimeError("refused\nbecause")
        self.rows.append(step)

    def close(self) -> None:
        self.rows.append(-1)


def told(sink: Sink, steps: range, *, resumed: int = 0) -> None:
    sinks = Sinks({"fake": sink})
    sinks.open(resumed)
    for step in steps:
        sinks.log(step, {"loss": float(step)})
    sinks.close(PATIENCE)


@pytest.mark.parametrize("failing", [{"failures": 2}, {"opens": 2}])
def test_what_a_sink_does_not_take_at_once_is_tried_again(failing, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sinks_module, "_PAUSES", (0.0, 0.0))
    sink = Fake(**failing)
    sinks = Sinks({"fake": sink})
    sinks.open(0)
    sinks.log(1, {})
    while not sink.rows:  # the end tries nothing again, so it must not come too early
        threading.Event().wait(0.001)
    sinks.close(PATIENCE)
    assert sink.rows == [1, -1]
    assert capsys.readouterr().err.count("warning: fake takes no values: ") == 1


def test_what_a_sink_never_takes_is_left_out_and_training_goes_on(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sinks_module, "_PAUSES", ())
    sink = Fake(failures=2)
    told(sink, range(1, 5))
    assert sink.rows == [3, 4, -1]
    assert "fake takes no values: refused; training goes on" in capsys.readouterr().err


def test_a_sink_that_stands_still_holds_up_nothing(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sinks_module, "MAX_WAITING", 3)
    sink, other = Fake(), Fake()
    sink.go.clear()
    sinks = Sinks({"still": sink, "other": other})
    sinks.open(0)
    for step in range(1, 4):
        sinks.log(step, {})
        while len(other.rows) < step:
            threading.Event().wait(0.001)
    for step in range(4, 9):
        sinks.log(step, {})
    sinks.close(0.05)
    err = capsys.readouterr().err
    assert err.count("warning: still is too slow or does not answer: values are left out") == 1
    assert "still has not taken all values" in err
    assert other.rows[:3] == [1, 2, 3]
    assert not sink.rows
    sink.go.set()


def test_what_a_sink_has_not_taken_a_snapshot_keeps(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sinks_module, "MAX_KEPT", 2)
    sink, fast = Fake(), Fake()
    sink.go.clear()
    sinks = Sinks({"slow": sink, "fast": fast})
    sinks.open(0)
    for step, value in ((1, 0.1), (2, math.nan), (3, 0.3)):
        sinks.log(step, {"loss": value})
    while "fast" in sinks.untaken():
        threading.Event().wait(0.001)
    kept = json.loads(json.dumps(packed(sinks.untaken()), allow_nan=False))
    assert list(kept) == ["slow"]
    assert [step for step, _ in kept["slow"]] == [2, 3]
    sink.go.set()
    sinks.close(PATIENCE)
    later = Sinks({"fast": fast, "slow": sink})
    later.open(3, unpacked(kept))
    later.log(4, {"loss": 0.4})
    later.close(PATIENCE)
    assert sink.rows == [1, 2, 3, -1, 2, 3, 4, -1]
    assert fast.rows == [1, 2, 3, -1, 4, -1]
    assert later.untaken() == {}
    assert unpacked({"slow": [["x"]]}) == unpacked(None) == unpacked([3]) == {}


def test_a_sink_without_its_package_says_so_once(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    told(TensorBoard("logs"), range(1, 3))
    assert capsys.readouterr().err.count("fake takes no values: the package is missing; pip") == 1


def test_a_function_of_the_scripts_own_is_told_and_what_it_raises_ends_nothing(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sinks_module, "_PAUSES", ())
    rows: list[object] = []

    def log(step: int, values: Mapping[str, float]) -> None:
        if step == 1:
            raise RuntimeError("not logged in")
        rows.append((step, values))

    sinks = Sinks({"log": Called(log)})
    sinks.open(0)
    for step in (1, 2):
        sinks.log(step, {"loss": 0.5})
    sinks.close(PATIENCE)
    assert rows == [(2, {"loss": 0.5})]
    assert "log takes no values: not logged in; training goes on" in capsys.readouterr().err


def test_tensorboard_hides_the_steps_that_come_again(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    calls: list[object] = []

    class SummaryWriter:
        def __init__(self, directory: str, purge_step: int) -> None:
            calls.append((directory, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append("flush")

        def close(self) -> None:
            calls.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    vars(module).update(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    told(TensorBoard("logs"), range(3, 5), resumed=2)
    assert calls == [
        ("logs", 3), ("loss", 3.0, 3), "flush", ("loss", 4.0, 4), "flush", "closed",
    ]  # fmt: skip


def test_real_tensorboard(tmp_path):  # type: ignore[no-untyped-def]
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told(TensorBoard(str(tmp_path)), range(1, 7))
    told(TensorBoard(str(tmp_path)), range(5, 9), resumed=4)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
