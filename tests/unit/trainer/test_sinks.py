"""Sinks: slow and failing ones, one curve over resumes, what W&B and MLflow are told.

wandb and mlflow are stand-ins that keep what they are told as their servers do; the last tests
use the real packages where they are installed.
"""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry import sinks as sinks_module
from ddpjob_trainer.telemetry.run_log import packed, unpacked
from ddpjob_trainer.telemetry.sink_choice import choose
from ddpjob_trainer.telemetry.sinks import Sink, Sinks
from ddpjob_trainer.telemetry.tensorboard import TensorBoard
from ddpjob_trainer.telemetry.trackers import RUN_TAG, MLflow, WandB
from ddpjob_trainer.training.run_config import run_id
from support.patience import PATIENCE


class Fake:
    """A sink that fails, or stands still, as told."""

    def __init__(self, *, failures: int = 0, opens: int = 0) -> None:
        self.rows: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self._failures = failures
        self._opens = opens

    def open(self, run_id: str, step: int) -> None:
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


def told(sink: Sink, steps: range, *, resumed: int = 0, name: str = "id") -> None:
    sinks = Sinks({"fake": sink})
    sinks.open(name, resumed)
    for step in steps:
        sinks.log(step, {"loss": float(step)})
    sinks.close(PATIENCE)


@pytest.mark.parametrize("failing", [{"failures": 2}, {"opens": 2}])
def test_what_a_sink_does_not_take_at_once_is_tried_again(failing, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sinks_module, "_PAUSES", (0.0, 0.0))
    sink = Fake(**failing)
    sinks = Sinks({"fake": sink})
    sinks.open("id", 0)
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
    sinks.open("id", 0)
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
    sinks.open("id", 0)
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
    later.open("id", 3, unpacked(kept))
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


# --- Which sinks ------------------------------------------------------------------------------


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="stand-in")
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def test_sinks_are_chosen_by_name_or_given(monkeypatch):  # type: ignore[no-untyped-def]
    module(monkeypatch, "wandb")
    module(monkeypatch, "tensorboard")
    assert list(choose("", None)) == []
    assert list(choose("", "logs")) == ["tensorboard"]
    assert list(choose("wandb, tensorboard", "logs")) == ["wandb", "tensorboard"]
    assert list(choose(["wandb", Fake(), Fake()], None)) == ["wandb", "Fake", "Fake 2"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("wandb", "'wandb' was asked for, but its package is not installed: pip install wandb"),
        ("comet", "'comet' is not known; use tensorboard, wandb, mlflow, or an object"),
        ([3], "int has no open()"),
        ("tensorboard", "'tensorboard' needs a directory: give tensorboard_dir, or set"),
    ],
)
def test_a_sink_that_cannot_be_is_refused_with_the_cure(asked, words, monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    module(monkeypatch, "tensorboard")
    (tmp_path / "wandb").mkdir()  # W&B leaves its files there: no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError) as error:
        choose(asked, None)
    assert words in str(error.value)


# --- One curve --------------------------------------------------------------------------------


def test_the_name_of_a_run_outlives_its_processes():  # type: ignore[no-untyped-def]
    one = Identity("uid", 1, 0, unique=True)
    assert run_id({}, one) == run_id({}, Identity("uid", 2, 3, unique=True))
    assert run_id({}, one) != run_id({}, Identity("other", 1, 0, unique=True))
    assert run_id({"run_id": "kept"}, one) == "kept"
    bare = Identity("local-none", 1, 0, unique=False)
    assert run_id({}, bare) != run_id({}, bare)


@dataclass
class WandbRun:
    server: Wandb
    rows: dict[int, dict[str, float]]

    @property
    def step(self) -> int:
        return max(self.rows, default=-1) + 1

    def log(self, values: dict[str, float], *, step: int) -> None:
        assert step >= max(self.rows, default=0), "W&B would drop it, with a warning"
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.server.finished += 1


@dataclass
class Wandb:
    """What W&B keeps: one row per step, in rising order; an id is one run."""

    runs: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    run: Any = None
    finished: int = 0

    def settings(self, **values: object) -> dict[str, object]:
        return values

    def init(self, *, id: str, resume: str, settings: object) -> WandbRun:  # noqa: A002
        assert resume == "allow"
        return WandbRun(self, self.runs.setdefault(id, {}))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module(monkeypatch, "wandb", Settings=self.settings, init=self.init, run=self.run)


def test_wandb_goes_on_with_its_run_and_takes_no_step_twice(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    server = Wandb()
    server.install(monkeypatch)
    told(WandB(), range(2, 13, 2), name="a")
    told(WandB(), range(8, 19, 2), resumed=6, name="a")
    told(WandB(), range(2, 5, 2), name="b")
    assert {n: list(rows) for n, rows in server.runs.items()} == {
        "a": [2, 4, 6, 8, 10, 12, 14, 16, 18],
        "b": [2, 4],
    }
    assert server.finished == 3
    assert not capsys.readouterr().err


def test_a_wandb_run_of_the_scripts_own_is_used_and_left_open(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    server = Wandb()
    server.run = server.init(id="mine", resume="allow", settings=None)
    server.install(monkeypatch)
    told(WandB(), range(1, 3), name="a")
    assert {name: list(rows) for name, rows in server.runs.items()} == {"mine": [1, 2]}
    assert not server.finished
    assert not capsys.readouterr().err


@dataclass
class Mlflow:
    """What MLflow keeps: every value that it is told, by run; it draws their ids."""

    tags: list[dict[str, str]] = field(default_factory=list)
    told: list[list[tuple[str, int]]] = field(default_factory=list)
    active: int = -1

    def search_runs(self, *, filter_string: str, max_results: int, output_format: str) -> Any:
        assert output_format == "list"
        found = [n for n, tags in enumerate(self.tags)
                 if filter_string == f"tags.`{RUN_TAG}` = '{tags[RUN_TAG]}'"]  # fmt: skip
        return [self._run(n) for n in found][:max_results]

    def _run(self, number: int) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=str(number)))

    def start_run(self, run_id: str | None = None, tags: dict[str, str] | None = None) -> None:
        if run_id is None:
            assert tags is not None
            self.tags.append(tags)
            self.told.append([])
        self.active = len(self.tags) - 1 if run_id is None else int(run_id)

    def log_metrics(self, values: dict[str, float], *, step: int) -> None:
        self.told[self.active] += [(name, step) for name in values]

    def get_metric_history(self, run: str, name: str) -> Any:
        return [types.SimpleNamespace(step=s) for n, s in self.told[int(run)] if n == name]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module(
            monkeypatch, "mlflow", search_runs=self.search_runs, start_run=self.start_run,
            active_run=lambda: self._run(self.active), MlflowClient=lambda: self,
            log_metrics=self.log_metrics, end_run=lambda: None,
        )  # fmt: skip


def test_mlflow_goes_on_with_its_run_and_takes_no_value_twice(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    server = Mlflow()
    server.install(monkeypatch)
    told(MLflow(), range(1, 5), name="a")
    sinks = Sinks({"mlflow": MLflow()})
    sinks.open("a", 2)
    for step in (3, 4, 5):
        sinks.log(step, {"loss": 0.5})
        sinks.log(step, {"accuracy": 0.5})  # the kill came before it was told
    sinks.close(PATIENCE)
    told(MLflow(), range(1, 3), name="b")
    assert server.told == [
        [("loss", 1), ("loss", 2), ("loss", 3), ("loss", 4),
         ("accuracy", 3), ("accuracy", 4), ("loss", 5), ("accuracy", 5)],
        [("loss", 1), ("loss", 2)],
    ]  # fmt: skip
    assert not capsys.readouterr().err


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

    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    told(TensorBoard("logs"), range(3, 5), resumed=2)
    assert calls == [
        ("logs", 3), ("loss", 3.0, 3), "flush", ("loss", 4.0, 4), "flush", "closed",
    ]  # fmt: skip


# --- The real ones, where they are installed --------------------------------------------------


def test_real_tensorboard(tmp_path):  # type: ignore[no-untyped-def]
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told(TensorBoard(str(tmp_path)), range(1, 7))
    told(TensorBoard(str(tmp_path)), range(5, 9), resumed=4)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_real_mlflow(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/db")
    told(MLflow(), range(1, 7), name="a")
    told(MLflow(), range(5, 9), resumed=4, name="a")
    (run,) = mlflow.search_runs(output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(n, float(n)) for n in range(1, 9)]


def test_real_wandb(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    told(WandB(), range(1, 7), name="abc123")
    (files,) = Path("wandb").glob("offline-run-*-abc123")
    assert list(files.glob("run-abc123.wandb"))
