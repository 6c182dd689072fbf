"""What the loop uses and no snapshot would hold is found, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

DATA = TensorDataset(torch.randn(60, 4), torch.randint(0, 2, (60,)))


class Holder:
    """A user's own object with a module inside."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


def guarded(case: str):  # type: ignore[no-untyped-def]
    def program(rank: int) -> None:
        run = ddp.start(total_steps=4, global_batch=6)
        model = nn.Linear(4, 2)
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.9)
        other: nn.Module = nn.Linear(4, 4)
        if case == "batch norm":
            other = nn.BatchNorm1d(4, affine=False)
        elif case == "frozen":
            other = copy.deepcopy(other).requires_grad_(False)
        elif case == "registered":
            run.register("other", other)
        elif case == "held":
            run.register("held", Holder(other))
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))  # a constant buffer
        used = case not in ("evaluation", "optimizer")
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(DATA):
            for x, y in step.batches:
                step.backward(loss(wrapped(other(x) if used else x), y))
            if case == "optimizer":
                second.step()
            step.commit()
            with run.evaluating(ema=True) as average:
                average(other(DATA.tensors[0]))
        run.finish()

    return program


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("module", "Linear is used in the loop, but no snapshot would hold its parameters"),
        ("batch norm", "BatchNorm1d changes its buffers in the loop"),
        ("optimizer", "SGD is used in the loop, but no snapshot would hold its state"),
    ],
)
def test_what_would_be_lost_is_an_error(gang, case, words):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 64}
    assert words in gang.log(0)
    assert "run.register(name, " in gang.log(0)


@pytest.mark.parametrize("case", ["frozen", "registered", "held", "evaluation"])
def test_what_is_kept_or_constant_is_none(gang, case):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 0}, gang.log(0)
