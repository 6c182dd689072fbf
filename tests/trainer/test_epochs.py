"""Runs that are counted in epochs, and small state that decides about training."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import ddpjob_trainer as ddp
from support.snapshots import await_snapshot

DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
EPOCHS, LENGTH = 4, 10  # 64 // 6


def train(directory: Path, *, die: int = -1) -> Any:
    def program(rank: int) -> None:
        snapshots = ddp.Snapshots(directory=directory / "s", every=7)
        run = ddp.start(epochs=EPOCHS, global_batch=6, snapshots=snapshots)
        net = nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.2), nn.Tanh(), nn.Linear(300, 2))
        optimizer = torch.optim.AdamW(net.parameters(), 0.05)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=0.001)
        state = run.state(best=math.inf, bad=0, seen=())
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(model(x).pow(2).mean() * 0.5**state.bad)
            if step.index == die and rank == 1:
                await_snapshot(max((directory / "s").glob("0*")), 21)
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit()
            if step.ends_epoch:
                value = run.evaluate(DATA, lambda net, batch: net(batch[0]).pow(2).sum())
                assert isinstance(value, float)
                state.seen = (*state.seen, step.index)
                if step.epoch % 2 and value < state.best:
                    state.best = value
                else:
                    state.bad += 1
        run.finish()
        told = f"{run.finished_steps} {state} {run.weights_sha256()} {run.state_sha256()}"
        (directory / f"result-{rank}").write_text(told)

    directory.mkdir(exist_ok=True)
    return program


def results(directory: Path) -> set[str]:
    return {path.read_text() for path in directory.glob("result-*")}


@pytest.mark.fault("T1")
def test_killed_in_the_midst_of_an_epoch_equals_undisturbed(gang, tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert gang.run(train(undisturbed)) == dict.fromkeys(range(3), 0), gang.log(0)
    assert gang.run(train(disturbed, die=25)) == {0: 75, 1: -9, 2: 75}
    assert gang.run(train(disturbed)) == dict.fromkeys(range(3), 0), gang.log(0)
    assert "resuming after step 21" in gang.log(0)
    assert "step 40/40" in gang.log(0)  # as if total_steps had said so
    assert "carries" not in gang.log(0)
    assert results(disturbed) == results(undisturbed)
    result, *_ = results(disturbed)
    assert "seen=(9, 19, 29, 39)" in result
    assert "bad=0" not in result


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.randn(60, 4))


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"epochs": 2}, "epochs=2: an epoch of a stream has no known length"),
        ({"total_steps": 2}, "step.ends_epoch: a stream does not say where it ends"),
    ],
)
def test_what_cannot_be_counted_is_refused(gang, start, text):
    def program(rank: int) -> None:
        run = ddp.start(global_batch=6, **start)
        model = nn.Linear(4, 1)
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in run.steps(Stream()):
            for x in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()
            print(step.ends_epoch)

    assert gang.run(program, world=1) == {0: 64}, gang.log(0)
    assert text in gang.log(0)
