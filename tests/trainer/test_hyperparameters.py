"""A restart with other arguments: told, and taken where that is asked for."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ddpjob_trainer as ddp

DATA = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
SAID = "the script had other hyperparameters before: "


def train(
    directory: Path, total: int, *, lr: float = 0.1, decay: float = 0.0, kind: str = "cosine",
    length: int = 8, **kept: Any,
) -> Any:  # fmt: skip
    """Train to step ``total``; leave rates and weights in files of its name."""

    def program(rank: int) -> None:
        snapshots = ddp.Snapshots(directory=directory / "s", **kept)
        run = ddp.start(total_steps=total, global_batch=6, snapshots=snapshots)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=decay)
        scheduler: Any = None
        if kind == "cosine":
            scheduler = lr_scheduler.CosineAnnealingLR(optimizer, length)
        elif kind == "chain":
            first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
            second = lr_scheduler.MultiStepLR(optimizer, [length])
            scheduler = lr_scheduler.SequentialLR(optimizer, [first, second], [2])
        model, _ = run.prepare(net, optimizer, scheduler=scheduler)
        rates = []
        for step in run.steps(DATA):
            if kind == "by hand":
                optimizer.param_groups[0]["lr"] *= 0.5
            rates.append(optimizer.param_groups[0]["lr"])
            for x in step.batches:
                step.backward(model(x).pow(2).mean())
            step.commit()
        group = optimizer.param_groups[0]
        state = scheduler.state_dict() if scheduler is not None else {}
        print("end", rates[0] if rates else None, group["weight_decay"], state)
        run.finish()
        if rank == 0:
            (directory / f"sha-{total}").write_text(run.weights_sha256())

    directory.mkdir(exist_ok=True)
    return program


def alone(gang: Any, program: Any) -> str:
    """What one process says."""
    before = len(gang.log(0)) if gang.log_path(0).exists() else 0
    assert gang.run(program, world=1) == {0: 0}, gang.log(0)
    return str(gang.log(0)[before:])


@pytest.mark.parametrize("kind", ["by hand", "chain"])
def test_what_training_has_changed_is_no_difference(gang, tmp_path, kind):
    alone(gang, train(tmp_path / "a", 4, kind=kind))
    assert SAID not in alone(gang, train(tmp_path / "a", 6, kind=kind))


def test_the_snapshots_go_on_and_it_is_told_each_time(gang, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    alone(gang, train(a, 4))
    other: dict[str, Any] = {"lr": 0.3, "decay": 0.5, "length": 20}
    text = (
        f"warning: {SAID}optimizer weight_decay 0.0 (now 0.5), optimizer initial_lr 0.1 (now 0.3),"
        " scheduler T_max 8 (now 20): keeping those of the snapshot"
    )
    assert text in alone(gang, train(a, 6, **other))
    assert text in alone(gang, train(a, 7, **other))
    assert SAID not in alone(gang, train(a, 8))
    alone(gang, train(b, 8))
    assert (a / "sha-8").read_text() == (b / "sha-8").read_text()


def test_the_scripts_are_taken_where_it_asks(gang, tmp_path):
    alone(gang, train(tmp_path / "a", 4))
    script = {"hyperparameters": "script"}
    other: dict[str, Any] = {"lr": 0.3, "decay": 0.5, "length": 20, **script}
    said = alone(gang, train(tmp_path / "a", 5, **other))
    assert "using the new ones, as snapshots" in said
    end = said.split("end ")[1]
    assert end.startswith("0.15")  # half of it, as the schedule was there
    assert "0.5 {'T_max': 20, 'eta_min': 0.0, 'base_lrs': [0.3], 'last_epoch': 5" in end
    assert SAID not in alone(gang, train(tmp_path / "a", 6, **other))
    alone(gang, train(tmp_path / "b", 4, kind="chain"))
    said = alone(gang, train(tmp_path / "b", 5, kind="chain", length=3, **script))
    assert f"{SAID}scheduler 1 milestones {{8: 1}} (now {{3: 1}})" in said
    assert "'milestones': Counter({3: 1})" in said.split("end ")[1]


@pytest.mark.parametrize("every", [None, "epoch"])
def test_a_scheduler_counts_steps_or_epochs(gang, tmp_path, every):
    """Ten steps an epoch; killed in the second one, it goes on with the rate of then."""

    def program(rank: int) -> None:
        snapshots = ddp.Snapshots(directory=tmp_path / "s", every=3)
        run = ddp.start(epochs=3, global_batch=6, snapshots=snapshots)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, _ = run.prepare(net, optimizer, scheduler=scheduler, scheduler_every=every)
        for step in run.steps(DATA):
            print(f"rate {step.index}:", abs(math.log2(optimizer.param_groups[0]["lr"])))
            for x in step.batches:
                step.backward(model(x).pow(2).mean() * 1e-3)
            step.commit()
            if step.index == 13 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                sys.exit(3)
        run.finish()

    assert gang.run(program, world=1) == {0: 3}
    said = gang.log(0) + alone(gang, program)
    rates = dict(re.findall(r"rate (\d+): (\d+)", said))
    count = 10 if every else 1
    assert rates == {str(index): str(index // count) for index in range(30)}
    warned = "StepLR advances at every step, and its schedule has the length 1" in said
    assert warned == (every is None)
