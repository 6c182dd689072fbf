"""Options of start() and prepare(): values that cannot be, combinations that are refused."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpjob_trainer as ddp
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.training.models.prepare import REFUSALS, Facts, refuse_incompatible


def made(**changes: Any) -> Options:
    defaults = {one.name: one.default for one in fields(Options)}
    return Options.among({**defaults, "total_steps": 9, "global_batch": 24, **changes})


def facts(start: dict[str, Any], prepare: dict[str, Any], device: str, **more: bool) -> Facts:
    return Facts(made(**start), ModelOptions(**prepare), device, **more)


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
def test_a_combination_is_refused_by_both_names_and_cured(first, second, bad, cured):
    with pytest.raises(ConfigError, match="do not go together") as error:
        refuse_incompatible(bad)
    assert first in str(error.value)
    assert second in str(error.value)
    assert "Use " in str(error.value)
    refuse_incompatible(cured)


def test_every_refusal_is_tried_and_documented():
    docs = (Path(__file__).parents[3] / "docs/guides/training.md").read_text()
    for refusal in REFUSALS:
        assert any(refusal.when(bad) for _, _, bad, _ in TABLE), refusal.first
        name = refusal.first.replace("'", '"').split("=")[0].split("(")[0]
        assert name in docs, f"docs/guides/training.md does not name {name}"


def test_a_value_that_cannot_be():
    for changes, words in (
        ({"epochs": 2}, "start() needs total_steps or epochs, and not both"),
        ({"total_steps": None}, "start() needs total_steps or epochs, and not both"),
        ({"tail": "join"}, "tail='join' must be one of 'drop', 'pad'; to count each sample"),
        ({"global_batch": 25}, "cannot be divided by 3 processes: use a multiple of 3"),
        ({"micro_batches": 5}, "3 processes x micro_batches=5: use a multiple of 15"),
        ({"level": "elastic", "shards": 5}, "cannot be divided by shards=5"),
        ({"level": "elastic", "shards": 2}, "at most 2 processes, not 3"),
        ({"level": "elastic", "micro_batches": 2}, "by shards=8 x micro_batches=2"),
    ):
        with pytest.raises(ConfigError) as error:
            made(**changes).check(3)
        assert words in str(error.value)
    with pytest.raises(ConfigError, match=r"ema=1\.0 must be a decay between 0 and 1"):
        ModelOptions(ema=1.0).check()


def test_groups_of_options_are_checked_as_one_is():
    taken = ddp.Snapshots.taken(ddp.Snapshots(directory="a", allow_changes="data"))
    assert (taken.directory, *taken.allow_changes) == (Path.cwd() / "a", "data")
    assert ddp.Logging.taken(None) == ddp.Logging()
    for given, words in (
        (ddp.Snapshots(keep=1), "snapshots.keep=1 must be at least 2"),
        ("a", "snapshots must be made as snapshots=ddp.Snapshots(...)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            ddp.Snapshots.taken(given)
