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
        wrapped, first = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.9)
        other: nn.Module = nn.Linear(4, 4)
        if case == "batch norm":
            other = nn.BatchNorm1d(4, affine=False)
        elif case in ("frozen", "teacher", "registered teacher"):
            other = copy.deepcopy(other).requires_grad_(False)
        elif case == "held":
            run.register("held", Holder(other))
        if "registered" in case and "optimizer" not in case:
            run.register("other", other)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))  # a constant buffer
        used = case not in ("evaluation", "per rank", "by itself") and "optimizer" not in case
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        if case == "registered optimizer":
            run.register("second", second)
        elif case == "per rank":
            run.register("second", second, per_rank=True)
        by_hand = {"by itself": first, "per rank": second, "optimizer": second}
        stepped = by_hand.get(case.removeprefix("late ").removeprefix("registered "))
        for step in run.steps(DATA):
            for x, y in step.batches:
                with torch.set_grad_enabled(case != "registered, no gradients"):
                    seen = other(x) if used else x
                step.backward(loss(wrapped(seen), y))
            if stepped is not None and (step.index == 3 or "late" not in case):
                stepped.step()
            step.commit()
            if "teacher" in case:
                with torch.no_grad():
                    other.weight.mul_(0.9).add_(model.weight[:1], alpha=0.1)
            with run.evaluating(ema=True) as average:
                average(other(DATA.tensors[0]))
        run.finish()

    return program


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("module", "Linear is used in the loop, but prepare() does not know it"),
        ("registered", "'other', which run.register() keeps, gets gradients"),
        ("held", "'held', which run.register() keeps, gets gradients"),
        ("optimizer", "SGD is used in the loop, but prepare() does not know it"),
        ("late optimizer", "SGD is used in the loop, but prepare() does not know it"),
        ("registered optimizer", "SGD is used in the loop, but prepare() does not know it"),
    ],
)
def test_what_nobody_would_average_is_an_error(gang, case, words):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 64}
    assert words in gang.log(0)
    assert "run.prepare([model, other], [optimizer, other_optimizer])" in gang.log(0)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("batch norm", "BatchNorm1d changes its buffers in the loop"),
        ("teacher", "Linear changes its parameters in the loop"),
    ],
)
def test_what_would_be_lost_is_an_error(gang, case, words):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 64}
    assert words in gang.log(0)
    assert "run.register(name, " in gang.log(0)


def test_the_loop_may_not_step_by_itself(gang):  # type: ignore[no-untyped-def]
    assert gang.run(guarded("by itself"), world=1) == {0: 64}
    assert "SGD.step() is called in the loop, on gradients that are not averaged" in gang.log(0)


@pytest.mark.parametrize(
    "case", ["frozen", "registered teacher", "registered, no gradients", "per rank", "evaluation"]
)
def test_what_is_kept_or_constant_is_none(gang, case):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 0}, gang.log(0)


def test_what_counts_in_a_plain_attribute_is_found_in_the_loop(gang):  # type: ignore[no-untyped-def]
    class Momentum(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.updates = getattr(self, "updates", 0) + 1
            return super().step(closure)

    class Queue(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    def counting(rank: int) -> None:
        run = ddp.start(total_steps=4, global_batch=6)
        model = Queue(4, 2)
        kind = Momentum if run.world_size == 1 else torch.optim.SGD
        wrapped, _ = run.prepare(model, kind(model.parameters(), lr=0.1))
        for step in run.steps(DATA):
            for x, y in step.batches:
                step.backward(nn.functional.cross_entropy(wrapped(x), y))
            step.commit()
        run.finish()

    assert gang.run(counting, world=1) == {0: 64}
    assert "Momentum.updates changes in each update, but no snapshot would hold it" in gang.log(0)
    assert gang.run(counting, world=2) == {0: 0, 1: 0}, gang.log(1)
    assert gang.log(0).count("the model changes 'calls' in the loop") == 1
    assert "the model changes" not in gang.log(1)


def test_what_prepare_is_given_may_use_what_is_registered_already(gang, tmp_path):  # type: ignore[no-untyped-def]
    """A clipping by the history of norms, which the snapshots keep."""

    def clipping(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6, snapshot_dir=tmp_path, snapshot_every=2)
        model, norms = nn.Linear(4, 2), {"all": [0.0]}
        run.register("norms", norms)

        def clip(parameters: Any) -> None:
            norms["all"].append(float(sum(p.grad.norm() for p in parameters.values())))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, _ = run.prepare(model, optimizer, before_update=clip)
        for step in run.steps(DATA):
            for x, y in step.batches:
                step.backward(nn.functional.cross_entropy(wrapped(x), y))
            step.commit()
            if step.index == 3 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                run._process.snapshots.settle()
                return  # not by run.finish(), after which nothing would be left to train
        run.finish()
        if rank == 0:
            (tmp_path / "norms").write_text(f"{run.finished_steps} {len(norms['all'])}")

    for _ in range(2):
        assert gang.run(clipping, world=1) == {0: 0}, gang.log(0)
    assert "resuming after step" in gang.log(0)
    assert (tmp_path / "norms").read_text() == "6 7"
    assert "the loop carries" not in gang.log(0)
