"""Every declared argument, given what it cannot be: one line that names it, no traceback."""

import inspect
import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddpjob_trainer as ddp
from ddpjob_trainer.arguments import Arguments, checked
from ddpjob_trainer.data.inputs import InputOptions
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.training.evaluation import EvaluationOptions

CALLS: dict[type[Arguments], Any] = {
    Options: ddp.start,
    ddp.Snapshots: ddp.Snapshots,
    ddp.Logging: ddp.Logging,
    ModelOptions: ddp.Run.prepare,
    InputOptions: ddp.Run.steps,
    EvaluationOptions: ddp.Run.evaluate,
}
#: Looked at elsewhere: as data, or as what is trained.
ELSEWHERE = {
    "dataset", "metric", "model", "optimizer", "scheduler", "before_update", "self", "snapshots",
    "logging",
}  # fmt: skip
ODD: dict[str, list[Any]] = {  # by the type that is declared
    "int": [True, 1.0, "3", "", -(2**70), 2**70, math.nan, [1], {}],
    "int | str": [True, 1.0, "3", "auto", "", 2**70, math.nan, [1]],
    "float": [True, "1.0", "", 0, -1.0, -(2**2000), math.nan, [], 1j],
    "bool": [0, 1, "no", "", math.nan, []],
    "bool | str": [0, 1, "", math.nan, []],
    "str": [5, True, b"x", [], math.nan],
    "str | os.PathLike[str]": [5, True, "", b"x", "a\0b", [], math.nan],
    "str | Sequence[str]": [5, True, math.nan, {}],
    "fetch.Collate": [3, True, "", []],
    "Log": [3, True, "", []],
    "torch.amp.GradScaler": [3, True, "", []],
}
DECLARED = [
    pytest.param(one, id=f"{kind.__name__}.{one.name}") for kind in CALLS for one in fields(kind)
]


@pytest.mark.parametrize("one", DECLARED)
def test_what_an_argument_cannot_be_is_refused_by_name(one):
    kind = str(one.type)
    if kind == "Any":  # sampler, weights: data
        return
    odd = list(ODD[kind.removesuffix(" | None")])
    if kind.endswith(" | None"):
        assert checked(one, None) is None
    else:
        odd.append(None)
    for value in odd:
        with pytest.raises(ConfigError) as error:
            checked(one, value)
        text = str(error.value)
        assert text.startswith(f"{one.name}="), text
        assert " must be " in text
        assert "\n" not in text
        assert len(text) < 200
    if "choices" in one.metadata:
        none = "None, " * kind.endswith(" | None")
        with pytest.raises(ConfigError, match=f"must be one of {none}'"):
            checked(one, "none of them")
    if "least" in one.metadata:
        with pytest.raises(ConfigError, match="must be at least"):
            checked(one, one.metadata["least"] - 1)


@pytest.mark.parametrize("kind", CALLS)
def test_every_argument_is_declared_once(kind):
    """A new one that is only in the signature would be checked by nobody."""
    shown = inspect.signature(CALLS[kind]).parameters
    assert shown.keys() - ELSEWHERE == {one.name for one in fields(kind)}
    for one in fields(kind) if CALLS[kind] in (ddp.start, ddp.Run.prepare) else ():
        found = shown[one.name]
        if one.default is MISSING:
            assert found.default is inspect.Parameter.empty, one.name
        elif found.default is not None:  # None: the environment decides
            assert found.default == one.default, one.name
        assert found.annotation == one.type or one.name in ("level", "threads"), one.name


def test_what_is_accepted_is_made_plain():
    def accepted(kind: type[Arguments], name: str, value: Any) -> Any:
        return checked(next(one for one in fields(kind) if one.name == name), value)

    assert type(accepted(Options, "total_steps", np.int64(3))) is int
    assert accepted(Options, "seed", -5) == -5
    assert type(accepted(ModelOptions, "clip_grad_norm", np.float32(0.5))) is float
    assert accepted(ModelOptions, "clip_grad_norm", math.inf) == math.inf
    assert accepted(ModelOptions, "static_graph", np.bool_(True)) is True
    assert accepted(ddp.Snapshots, "directory", "here") == Path.cwd() / "here"
    assert accepted(ModelOptions, "compile", "eager") == "eager"
    scaler = torch.amp.GradScaler("cpu")
    assert accepted(ModelOptions, "grad_scaler", scaler) is scaler
