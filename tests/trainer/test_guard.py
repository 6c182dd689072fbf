"""What the loop trains wrongly without any restart is refused; ordinary scripts just train."""

from __future__ import annotations

import copy
from typing import Any

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
        if "teacher" in case:
            other = copy.deepcopy(other).requires_grad_(False)
            run.register("other", other)
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
            if "teacher" in case:
                with torch.no_grad():
                    other.weight.mul_(0.9).add_(model.weight[:1], alpha=0.1)
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


@pytest.mark.parametrize("case", ["never trained", "registered teacher", "per rank"])
def test_what_is_kept_or_constant_is_none(gang, case):  # type: ignore[no-untyped-def]
    assert gang.run(guarded(case), world=1) == {0: 0}, gang.log(0)


class RateLogger:
    """Counts and looks like a scheduler; the rate is set from step.index."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.rates, self.calls = optimizer, [0.1], 0

    def step(self) -> None:
        self.calls += 1
        self.rates.append(self.optimizer.param_groups[0]["lr"])


class Accuracy(nn.Module):
    """A metric for the log, with buffers, as torchmetrics have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros(()))
        self.register_buffer("all", torch.zeros(()), persistent=False)

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.right += (out.argmax(1) == y).sum()  # type: ignore[operator]
        self.all += len(y)  # type: ignore[operator]
        result: torch.Tensor = self.right / self.all  # type: ignore[operator]
        return result


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # for the log
        return super().forward(x)


@pytest.mark.fault("T14")
def test_an_ordinary_script_with_its_logs_just_trains(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Each of these was refused, or warned of, when logs were taken for state."""

    def logging(rank: int) -> None:
        run = ddp.start(total_steps=8, global_batch=6, snapshot_dir=tmp_path / "s")
        model = Counting(4, 2)
        wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rates, accuracy = RateLogger(optimizer), Accuracy()
        seen, running, best, history, times = 0, 0.0, 9.0, [], {}  # type: ignore[var-annotated]
        for step in run.steps(DATA):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step.index)
            for x, y in step.batches:
                out = wrapped(x)
                accuracy(out.detach(), y)
                step.backward(nn.functional.cross_entropy(out, y))
                seen += len(x)
            step.commit()
            rates.step()
            running = 0.9 * running + 0.1 * step.loss
            best = min(best, step.loss)
            history.append(step.loss)
            times[step.index] = (seen, running, best)
        run.finish()
        assert rates.calls == len(history) == 8

    assert gang.run(logging, world=2) == {0: 0, 1: 0}, gang.log(0)
    assert "warning" not in gang.log(0)


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
