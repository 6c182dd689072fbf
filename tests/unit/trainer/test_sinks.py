"""Sinks: slow and failing ones, TensorBoard's curve over a resume."""

from __future__ import annotations

import sys
import threading
import types
from functools import partial

from ddpjob_trainer.telemetry import run_log as sinks_module
from ddpjob_trainer.telemetry.run_log import Opener, Sink, tensorboard
from support.patience import PATIENCE


class Fake:
    def __init__(self, *, failures: int = 0) -> None:
        self.rows: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self._failures = failures

    def open(self, step: int) -> Fake:
        return self

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.go.wait(PATIENCE)
        values.clear()  # its own copy
        if self._failures:
            self._failures -= 1
            raise RuntimeError("refused\nbecause")
        self.rows.append(step)


def told(opener: Opener, steps: range, *, resumed: int = 0) -> None:
    sink = Sink("fake", opener)
    sink.start(resumed)
    for step in steps:
        sink.put(step, {"loss": float(step)})
    sink.finish()
    sink.wait(PATIENCE)


def test_what_a_sink_refuses_is_left_out_and_training_goes_on(capsys):
    sink = Fake(failures=2)
    told(sink.open, range(1, 5))
    assert sink.rows == [3, 4]
    said = capsys.readouterr().err
    assert said.count("warning: fake takes no values: refused; training goes on\n") == 1


def test_a_sink_that_stands_still_holds_up_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sinks_module, "MAX_WAITING", 3)
    fake = Fake()
    fake.go.clear()
    sink = Sink("still", fake.open)
    sink.start(0)
    for step in range(1, 9):
        sink.put(step, {})
    sink.finish()
    sink.wait(0.05)
    err = capsys.readouterr().err
    assert err.count("warning: still is too slow or does not answer: values are left out") == 1
    assert "still has not taken all values" in err
    assert not fake.rows
    fake.go.set()


def test_a_sink_without_its_package_says_so_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    opened: list[int] = []
    told(lambda step: (opened.append(step), tensorboard("logs", step))[1], range(1, 3))
    words = "fake takes no values: the package is missing; pip install tensorboard; training"
    assert capsys.readouterr().err.count(words) == len(opened) == 1


def test_tensorboard_hides_the_steps_that_come_again(monkeypatch, capsys):
    calls: list[object] = []

    class SummaryWriter:
        def __init__(self, directory: str, purge_step: int) -> None:
            calls.append((directory, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append("flush")

    module = types.ModuleType("torch.utils.tensorboard")
    vars(module).update(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    told(partial(tensorboard, "logs"), range(3, 5), resumed=2)
    assert calls == [("logs", 3), ("loss", 3.0, 3), "flush", ("loss", 4.0, 4), "flush"]
