"""What the loop trains wrongly without any restart is refused; ordinary scripts just train."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

DATA = TensorDataset(torch.randn(60, 4), torch.randint(0, 2, (60,)))


def guarded(case: str):  # type: ignore[no-untyped-def]
    def program(rank: int) -> None:
        run = ddp.start(total_steps=4, global_batch=6)
        model = nn.Linear(4, 2)
        wrapped, first = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.9)
        other: nn.Module = nn.Linear(4, 4)  # as a perceptual loss has one: nobody steps it
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))  # a constant buffer
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        if case == "per rank":
            run.register("second", second, per_rank=True)
        by_hand = {"by itself": first, "per rank": second, "late optimizer": second}
        for step in run.steps(DATA):
            for x, y in step.batches:
                step.backward(loss(wrapped(other(x)), y))
            if case in by_hand and (step.index == 3 or "late" not in case):
                by_hand[case].step()
            step.commit()
            with run.evaluating(ema=True) as average:
                average(other(DATA.tensors[0]))
        run.finish()

    return program


@pytest.mark.parametrize(
    ("case", "words", "cure"),
    [
        (
            "late optimizer",
            "SGD is used in the loop, but prepare() does not know it",
            "run.prepare([model, other], [optimi",
        ),
        (
            "by itself",
            "SGD.step() is called in the loop, on gradients that are not averaged",
            "step.commit() alone",
        ),
    ],
)
def test_what_nobody_would_average_is_an_error(gang, case, words, cure):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 64}
    assert words in gang.log(0)
    assert cure in gang.log(0)


@pytest.mark.parametrize("case", ["never trained", "per rank"])
def test_what_is_kept_or_constant_is_none(gang, case):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 0}, gang.log(0)
