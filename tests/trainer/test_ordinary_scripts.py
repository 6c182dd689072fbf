"""Ordinary scripts, killed and started again: nobody refuses them, or warns."""

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import lr_scheduler

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

    def __init__(self, rank: int, directory: Path, **start: Any) -> None:
        self.rank, self.directory = rank, directory
        kept = ddp.Snapshots(directory=directory / "s", every=EVERY)
        self.run = ddp.start(total_steps=STEPS, global_batch=8, seed=3, snapshots=kept, **start)

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


def adversarial(steps: Steps) -> None:
    """A GAN: two optimizers, the penalty of R1, gradients that a loss leaves in the other model."""
    run = steps.run
    g, d = (
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)),
        net()[:3].append(nn.Linear(16, 1)),
    )
    (generator, critic), (of_g, of_d) = run.prepare(
        [g, d], [torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)]
    )
    for step in steps:
        for batch in step.batches:
            real, noise = batch["x"].requires_grad_(), torch.randn(len(batch["x"]), 4)
            fake = generator(noise)
            of_d.zero_grad()
            out = critic(real)
            (slope,) = torch.autograd.grad(out.sum(), real, create_graph=True)
            step.backward((critic(fake.detach()) - out).mean() + slope.pow(2).sum(1).mean())
            step.update(of_d)
            of_g.zero_grad()
            step.backward(-critic(fake).mean())
            step.update(of_g)
        step.commit()


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


def finding(steps: Steps) -> None:
    """Finds a rate first, on the model itself, which it puts back; then exploits it."""
    run = steps.run
    model = net()
    before = copy.deepcopy(model.state_dict())
    trial = torch.optim.SGD(model.parameters(), 1e-4)
    rates = lr_scheduler.ExponentialLR(trial, 2.0)
    for index in range(5):
        loss = cross_entropy(model(torch.randn(8, 8)), torch.tensor([index % 3] * 8))
        trial.zero_grad()
        loss.backward()
        trial.step()
        rates.step()
    model.load_state_dict(before)
    wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
    for step in steps:
        for batch in step.batches:
            x = batch["x"].clone().requires_grad_()
            attack = torch.optim.SGD([x], 0.1)  # an input that deceives the model
            for _ in range(2):
                attack.zero_grad()
                (x.grad,) = torch.autograd.grad(-cross_entropy(model(x), batch["y"]), x)
                attack.step()
            step.backward(cross_entropy(wrapped(x.detach()), batch["y"]))
        step.commit()


def restarting(steps: Steps) -> None:
    """Warm restarts, one scheduler prepared, one called as timm does; clips as plain loops do."""
    run = steps.run
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)
    wrapped, _ = run.prepare(model, optimizer, scheduler=schedule)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.1)
    logged = lr_scheduler.CosineAnnealingWarmRestarts(other, 4)
    for step in steps:
        for batch in step.batches:
            step.backward(cross_entropy(wrapped(batch["x"]), batch["y"]))
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        step.commit()
        logged.step(step.epoch + step.index / 6)
        run.log({"norm": norm, "lr": schedule.get_last_lr()[0]})


def by_plateau(steps: Steps) -> None:
    """By the loss' plateau; autocast by hand around the forward and the loss, of two batches."""
    run = steps.run
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    run.register("plateau", plateau)
    wrapped, _ = run.prepare(model, optimizer)
    for step in steps:
        for batch in step.batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(wrapped(batch["x"]), batch["y"])
            step.backward(loss)
        step.commit()
        if step.ends_epoch:
            plateau.step(step.loss)


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


SCRIPTS: dict[Callable[[Steps], None], dict[str, Any]] = {
    averaged: {}, adversarial: {}, measured: {}, frozen: {}, finding: {}, restarting: {},
    by_plateau: {"micro_batches": 2}, taught: {},
}  # fmt: skip


@pytest.mark.fault("T14")
@pytest.mark.parametrize("script", some_in_gate(SCRIPTS, measured))
def test_an_ordinary_script_is_left_in_peace(gang, tmp_path, script):
    def program(rank: int) -> None:
        steps = Steps(rank, tmp_path, **SCRIPTS[script])
        script(steps)
        steps.run.finish()

    env = {REPLAY_DIR: str(tmp_path / "replay")}
    assert gang.run(program, world=2, env=env)[1] == -signal.SIGKILL, gang.last_words()
    assert gang.run(program, world=2, env=env) == CODES, gang.last_words()
    told = (gang.log(0) + gang.log(1)).splitlines()
    assert [line for line in told if line.startswith("ddpjob") and "warning" in line] == []
    assert any("restart proven: steps 7 to " in line for line in told)
