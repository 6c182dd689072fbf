"""Options of start() and prepare(): values that cannot be, combinations that are refused."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpjob_trainer as ddp
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions, Options, Reporting, SnapshotOptions
from ddpjob_trainer.training.models.incompatible import REFUSALS, Facts, refuse


def options(**changes: Any) -> Options:
    values = {"total_steps": 9, "global_batch": 24, "seed": 0, "level": "resume", "threads": 1}
    return Options(**{**values, "collate": None, **changes})


def made(**changes: Any) -> Options:
    defaults = {one.name: one.default for one in fields(Options)}
    return Options.among({**defaults, "total_steps": 9, "global_batch": 24, **changes})


def facts(start: dict[str, Any], prepare: dict[str, Any], device: str, **more: bool) -> Facts:
    return Facts(options(**start), ModelOptions(**prepare), device, **more)


ELASTIC = {"level": "elastic"}
TABLE: list[tuple[str, str, Facts, Facts]] = [  # both names, what is refused, and its cure
    ("comm_hook", "level='elastic'", facts(ELASTIC, {"comm_hook": "bf16"}, "cpu"),
     facts(ELASTIC, {}, "cpu")),
    ("static_graph=True", "level='elastic'", facts(ELASTIC, {"static_graph": True}, "cpu"),
     facts({}, {"static_graph": True}, "cpu")),
    ("static_graph=True", "micro_batches",
     facts({"micro_batches": 2}, {"static_graph": True}, "cpu"),
     facts({"micro_batches": 2}, {}, "cpu")),
    ("SyncBatchNorm", "level='elastic'", facts(ELASTIC, {"sync_batchnorm": True}, "cuda"),
     facts({}, {"sync_batchnorm": True}, "cuda")),
    ("SyncBatchNorm", "training on the CPU", facts({}, {}, "cpu", has_sync_batchnorm=True),
     facts({}, {}, "cpu")),
    ("SyncBatchNorm", "training on the CPU", facts({}, {"sync_batchnorm": True}, "cpu"),
     facts({}, {"sync_batchnorm": False}, "cpu")),
    ("grad_scaler", "precision", facts({}, {"grad_scaler": torch.amp.GradScaler("cpu")}, "cpu"),
     facts({"precision": "fp16"}, {"grad_scaler": torch.amp.GradScaler("cpu")}, "cpu")),
    ("several models", "level='elastic'", facts(ELASTIC, {}, "cpu", several_models=True),
     facts({}, {}, "cpu", several_models=True)),
    ("several models", "comm_hook", facts({}, {"comm_hook": "bf16"}, "cpu", several_models=True),
     facts({}, {"comm_hook": "bf16"}, "cpu")),
    ("several models", "static_graph",
     facts({}, {"static_graph": True}, "cpu", several_models=True),
     facts({}, {"static_graph": True}, "cpu")),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "bad", "cured"), TABLE)
def test_a_combination_is_refused_by_both_names_and_cured(first, second, bad, cured):  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="do not go together") as error:
        refuse(bad)
    assert first in str(error.value)
    assert second in str(error.value)
    assert "Use " in str(error.value)
    refuse(cured)


def test_every_refusal_is_tried_and_documented():  # type: ignore[no-untyped-def]
    docs = (Path(__file__).parents[3] / "docs/guides/training.md").read_text()
    for refusal in REFUSALS:
        assert any(refusal.when(bad) for _, _, bad, _ in TABLE), refusal.first
        name = refusal.first.replace("'", '"').split("=")[0].split("(")[0]
        assert name in docs, f"docs/guides/training.md does not name {name}"


def test_a_value_that_cannot_be():  # type: ignore[no-untyped-def]
    defaults = {one.name: one.default for one in fields(ModelOptions)}
    for changes, words in (
        ({"total_steps": 0}, "total_steps=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"epochs": 2}, "start() needs total_steps or epochs, and not both"),
        ({"total_steps": None}, "start() needs total_steps or epochs, and not both"),
        ({"tail": "join"}, "tail='join' must be one of 'drop', 'pad'; to count each sample"),
        ({"check_every": -1}, "check_every=-1 must be at least 0"),
        ({"global_batch": 25}, "cannot be divided by 3 processes: use a multiple of 3"),
        ({"micro_batches": 5}, "3 processes x micro_batches=5: use a multiple of 15"),
        ({"level": "elastic", "shards": 5}, "cannot be divided by shards=5"),
        ({"level": "elastic", "shards": 2}, "at most 2 processes, not 3"),
        ({"level": "elastic", "micro_batches": 2}, "by shards=8 x micro_batches=2"),
        ({"comm_hook": "powersgd"}, "comm_hook='powersgd' must be one of None, 'bf16', 'fp16'"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0 must be more than 0"),
        ({"ema": 1.0}, "ema=1.0 must be a decay between 0 and 1"),
    ):
        of_model = changes.keys() <= defaults.keys()
        with pytest.raises(ConfigError) as error:
            ModelOptions.among(defaults | changes).check() if of_model else made(**changes).check(3)
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("function", "declared"),
    [(ddp.start, (Options, SnapshotOptions, Reporting)), (ddp.Run.prepare, (ModelOptions,))],
)
def test_every_option_is_declared_once(function, declared):  # type: ignore[no-untyped-def]
    options = {option.name: option for kind in declared for option in fields(kind)}
    parameters = inspect.signature(function).parameters
    objects = {"self", "model", "optimizer", "scheduler", "before_update"}
    assert parameters.keys() - objects == options.keys()
    for name, option in options.items():
        shown = parameters[name]
        if option.default is MISSING:
            assert shown.default is inspect.Parameter.empty, name
        elif shown.default is not None:  # None: the environment decides
            assert shown.default == option.default, name
        paths_and_names = "Path" in option.type or "Several" in option.type
        if not paths_and_names and name not in ("level", "threads"):
            assert shown.annotation == option.type, name
