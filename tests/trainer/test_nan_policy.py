"""A loss or gradient that is not finite: all ranks stop, skip or go on, and alike."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from support.snapshots import await_snapshot
from support.stand import ALL_0, Stand, resumed

STEPS = 8
ALL_70 = {0: 70, 1: 70, 2: 70}


@dataclass(kw_only=True)
class Training(Stand, total_steps=STEPS, global_batch=48):
    bad: tuple[int, int] = (1, 4)  # rank, index of the step
    how: str = "loss"
    clip: float | None = None

    def train(self, run: ddp.Run) -> str:
        model = nn.Sequential(nn.Linear(32, 96), nn.Dropout(0.2), nn.ReLU(), nn.Linear(96, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        wrapped, _ = run.prepare(
            model, optimizer, scheduler=scheduler, bucket_cap_mb=0.01, clip_grad_norm=self.clip
        )
        data = TensorDataset(torch.randn(96, 32), torch.randint(0, 8, (96,)))
        for step in run.steps(data):
            if step.index and step.index % 2 == 0:
                await_snapshot(max((self.directory / "snapshots").glob("0*")), step.index)
            first = True
            for x, y in step.batches:
                loss = nn.functional.cross_entropy(wrapped(x), y)
                if first and (run.rank, step.index) == self.bad:
                    loss = self._spoil(loss, model)
                first = False
                step.backward(loss)
            self.may_die(run, step.index)
            step.commit()
            if self.how == "parameter" and step.index == self.bad[1] - 1:
                with torch.no_grad():
                    model[3].weight[0, 0] = math.inf
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        return f"{scheduler.last_epoch} {finite}"

    def _spoil(self, loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
        if self.how == "loss":
            return loss * 0 + loss.new_tensor(math.nan)
        if self.how == "loss alone":  # a gradient that shows nothing of it
            return loss + math.inf
        if self.how == "gradient":  # the root's slope at 0 is infinite, and 0 * inf is NaN
            return loss + (model[3].weight * 0).sum().sqrt()
        return loss

    def snapshots(self) -> set[str]:
        return {p.stem.split("-")[1].lstrip("0") for p in self.directory.glob("*/*/step-*.json")}


@pytest.mark.parametrize("level", ["resume", "elastic"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("loss", "step 4: gradients are not finite, first that of '0.weight'; the loss of rank 1"),
        ("loss alone", "the loss of rank 1 is"),
        ("gradient", "first that of '3.weight'; every loss is finite"),
        ("parameter", "Parameter '3.weight' was not finite already before this update"),
    ],
)
@pytest.mark.fault("T8")
def test_stop_ends_all_ranks_before_the_update(gang, tmp_path, level, how, words):
    clip = 1.0 if how == "gradient" else None
    training = Training(tmp_path, {"level": level}, how=how, clip=clip)
    assert gang.run(training) == ALL_70
    for rank in range(3):
        assert words in gang.log(rank)
    assert training.snapshots() <= {"2", "4"}


@pytest.mark.parametrize("level", ["resume", "elastic"])
@pytest.mark.parametrize(("how", "micro", "clip"), [("loss alone", 2, None), ("gradient", 1, 0.1)])
@pytest.mark.fault("T8")
def test_skip_leaves_one_update_out_and_resumes_exactly(gang, tmp_path, level, how, micro, clip):
    start = {"nan_policy": "skip", "level": level, "micro_batches": micro}
    calm, wild = (Training(tmp_path / name, start, how=how, clip=clip) for name in "ab")
    assert gang.run(calm) == ALL_0, gang.log(0)
    assert gang.log(0).count("The update is skipped, number 1") == 1
    results = [result.split() for result in calm.results()]
    assert len({result[0] for result in results}) == 1
    assert results[0][2:] == [str(STEPS - 1), "True"]
    assert resumed(gang, wild, (2, 5), 4) == calm.results()


def test_skip_leaves_no_trace_in_batch_norm(gang, tmp_path):
    """One bad sample would otherwise be in its running statistics, and every snapshot, for ever."""

    def train(rank: int) -> None:
        run = ddp.start(total_steps=4, global_batch=12, nan_policy="skip", micro_batches=2)
        model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
        wrapped, _ = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=0.001
        )
        for step in run.steps(TensorDataset(torch.randn(48, 4))):
            before = [buffer.clone() for buffer in model.buffers()]
            for (x,) in step.batches:
                bad = (rank, step.index) == (0, 2)
                step.backward(wrapped(x * math.nan if bad else x).pow(2).mean())
            step.commit()
            same = map(torch.equal, before, model.buffers())
            assert all(same) == (step.index == 2)
        run.finish()

    assert gang.run(train) == ALL_0, gang.log(0)
    assert "The update is skipped, number 1" in gang.log(0)


@pytest.mark.parametrize("case", ["stop", "skip", "skip, update()"])
@pytest.mark.fault("T8")
def test_gradients_that_one_rank_alone_has_spoilt_end_all_and_name_it(gang, case):
    """It would otherwise wait for the others, or leave out an update that they make."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=9, global_batch=12, nan_policy=case[:4], check_every=0)
        model = nn.Linear(4, 2)
        wrapped, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(TensorDataset(torch.randn(48, 4))):
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).mean())
            if (rank, step.index) == (1, 2):
                model.bias.grad[0] = math.nan  # type: ignore[index]
            if "update" in case:
                step.update(optimizer)
            step.commit()

    assert gang.run(program) == ALL_70
    for rank in range(3):
        assert "step 2: averaged gradients" in gang.log(rank)
        assert "are not finite on rank 1" in gang.log(rank)
    if "update" not in case:
        assert "first that of 'bias'" in gang.log(1)


def test_skip_stops_when_no_update_can_help_and_ignore_is_plain_pytorch(gang, tmp_path):
    assert gang.run(Training(tmp_path / "skip", {"nan_policy": "skip"}, how="parameter")) == ALL_70
    assert "Parameter '3.weight' was not finite already" in gang.log(2)
    training = Training(tmp_path, {"nan_policy": "ignore"}, how="gradient")
    assert gang.run(training) == ALL_0
    assert {result.split()[3] for result in training.results()} == {"False"}
