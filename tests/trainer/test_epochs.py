"""Runs that are counted in epochs, and small state that decides about training."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import ddpjob_trainer as ddp
from support.stand import ALL_0, Stand, resumed

DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
EPOCHS = 4  # of 10 steps


class Training(Stand, every=7, epochs=EPOCHS, global_batch=6):
    def train(self, run: ddp.Run) -> str:
        net = nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.2), nn.Tanh(), nn.Linear(300, 2))
        optimizer = torch.optim.AdamW(net.parameters(), 0.05)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=0.001)
        state = run.state(best=math.inf, bad=0, seen=())
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(model(x).pow(2).mean() * 0.5**state.bad)
            self.may_die(run, step.index)
            step.commit()
            if step.ends_epoch:
                value = run.evaluate(DATA, lambda net, batch: net(batch[0]).pow(2).sum())
                assert isinstance(value, float)
                state.seen = (*state.seen, step.index)
                if step.epoch % 2 and value < state.best:
                    state.best = value
                else:
                    state.bad += 1
        return f"{run.finished_steps} {state}"


@pytest.mark.fault("T1")
def test_killed_in_the_midst_of_an_epoch_equals_undisturbed(gang, tmp_path):
    undisturbed, disturbed = (Training(tmp_path / name) for name in "ab")
    assert gang.run(undisturbed) == ALL_0, gang.log(0)
    results = resumed(gang, disturbed, (1, 25), 21)
    assert "step 40/40" in gang.log(0)  # as if total_steps had said so
    assert "carries" not in gang.log(0)
    assert results == undisturbed.results()
    assert "seen=(9, 19, 29, 39)" in results[0]
    assert "bad=0" not in results[0]


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
