"""Ordinary scripts, killed and started again: nobody refuses them, or warns."""

import copy
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import ddpjob_trainer as ddp
from ddpjob_trainer.environment import REPLAY_DIR
from support.snapshots import await_snapshot
from support.tiers import some_in_gate

SAMPLES, STEPS, EVERY, KILLED = 48, 18, 6, 9  # 6 steps in an epoch
CODES = {0: 0, 1: 0}


class Pictures:
    """Augments by every generator there is; a sample carries its path, and when it was read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if random.random() < 0.5:
            x = -x
        x = x + float(np.random.rand()) * torch.rand(8)
        path = f"/scratch/{os.getpid()}/{index}.jpg"
        return {"x": x, "y": index % 3, "path": path, "read": time.time()}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )


class Steps:
    """The steps of a run; ``after`` kills a rank once."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.directory = rank, directory
        kept = ddp.Snapshots(directory=directory / "s", every=EVERY)
        self.run = ddp.start(total_steps=STEPS, global_batch=8, seed=3, snapshots=kept)

    def __iter__(self) -> Iterator[ddp.Step]:
        for step in self.run.steps(Pictures()):
            yield step
            killed = self.directory / "killed"
            if step.index == KILLED and self.rank == 1 and not killed.exists():
                await_snapshot(self.directory / "s/00000001", EVERY)
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def averaged(steps: Steps) -> None:
    """As timm does it: an average of its own, by which it evaluates; nothing is registered."""
    run = steps.run
    model = net()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    wrapped, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    losses, best = [], 9.0
    for step in steps:
        optimizer.zero_grad()
        for batch in step.batches:
            loss = cross_entropy(wrapped(batch["x"]), batch["y"])
            step.backward(loss)
            losses.append(loss.item())
        step.commit()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            for kept, now in zip(average.buffers(), model.buffers(), strict=True):
                kept.copy_(now)
        if step.ends_epoch:
            with torch.no_grad():
                best = min(best, float(cross_entropy(average(batch["x"]), batch["y"])))


class Confusion(nn.Module):
    """A metric, as torchmetrics have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3, 3))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.table[y, out.argmax(1)] += 1  # type: ignore[index,operator]
        return self.table.diag().sum() / self.table.sum()  # type: ignore[operator,union-attr]


class RateLogger:
    """Counts and looks like a scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self) -> None:
        self.calls += 1


def measured(steps: Steps) -> None:
    """A metric with buffers, reset at an epoch's end, and whatever else a log is made of."""
    run = steps.run
    model, metric = net(), Confusion()
    wrapped, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    rates, running, history = RateLogger(optimizer), 0.0, {}
    for step in steps:
        model.train()
        for batch in step.batches:
            out = wrapped(batch["x"])
            run.log({"accuracy": run.sum(float(metric(out.detach(), batch["y"]))) / 2})
            step.backward(cross_entropy(out, batch["y"]))
        step.commit()
        rates.step()
        running = 0.9 * running + 0.1 * step.loss
        history[step.index] = running
        if step.ends_epoch:
            metric.table.zero_()  # type: ignore[operator]
            model.eval()
            with torch.no_grad():
                wrapped(batch["x"])


def frozen(steps: Steps) -> None:
    """A backbone in eval mode without gradients, a head that learns at a rate set by hand."""
    run = steps.run
    model = nn.Sequential(net()[:3], nn.Linear(16, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    seen = nn.Linear(3, 4)  # of a perceptual loss: it gets gradients, and nobody steps it
    learns = filter(lambda p: p.requires_grad, model.parameters())
    wrapped, optimizer = run.prepare(model, torch.optim.AdamW(learns, 0.01))
    for step in steps:
        wrapped.train()
        model[0].eval()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.97**step.index
        for batch in step.batches:
            out = wrapped(batch["x"])
            near = mse_loss(seen(out), seen(batch["x"][:, :3]))
            step.backward(cross_entropy(out, batch["y"]) + 0.1 * near)
        step.commit()


def taught(steps: Steps) -> None:
    """BYOL: a teacher that follows the model is a part of the loss, and registered."""
    run = steps.run
    model, predictor = net(), nn.Linear(3, 3)
    teacher = copy.deepcopy(model).requires_grad_(False)
    run.register("teacher", teacher)
    both = nn.ModuleDict({"net": model, "predictor": predictor})
    both.forward = lambda x: predictor(model(x))  # type: ignore[method-assign]
    wrapped, _ = run.prepare(both, torch.optim.AdamW(both.parameters(), 0.01))
    for step in steps:
        for batch in step.batches:
            with torch.no_grad():
                target = teacher(batch["x"])
            step.backward(mse_loss(wrapped(batch["x"]), target))
        step.commit()
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.05)


SCRIPTS = [averaged, measured, frozen, taught]


@pytest.mark.fault("T14")
@pytest.mark.parametrize("script", some_in_gate(SCRIPTS, measured))
def test_an_ordinary_script_is_left_in_peace(gang, tmp_path, script):
    def program(rank: int) -> None:
        steps = Steps(rank, tmp_path)
        script(steps)
        steps.run.finish()

    env = {REPLAY_DIR: str(tmp_path / "replay")}
    assert gang.run(program, world=2, env=env)[1] == -signal.SIGKILL, gang.last_words()
    assert gang.run(program, world=2, env=env) == CODES, gang.last_words()
    told = (gang.log(0) + gang.log(1)).splitlines()
    assert [line for line in told if line.startswith("ddpjob") and "warning" in line] == []
    assert any("restart proven: steps 7 to " in line for line in told)
