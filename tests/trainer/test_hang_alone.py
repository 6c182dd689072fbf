"""A hang without our launcher: each rank watches itself, and the one at fault ends first."""

import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import ddpjob_trainer as ddp
from ddpjob_trainer.liveness import hang

HANG = {
    "DDPJOB_HANG_STARTUP_SECONDS": "300",
    "DDPJOB_HANG_STEP_SECONDS": "10",
    "DDPJOB_HANG_SNAPSHOT_SECONDS": "300",
}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the waiting get on top is much more than the one at fault needs to end."""
    monkeypatch.setattr(hang, "_WAITING_SECONDS", 30)


class Data:
    """Rank 1 never gets its batch of the sixth step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._asked = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._asked += 1
        # Three are made at the start, to be compared over the ranks.
        if self._rank == 1 and self._asked > 3 + 5 * 4:
            self.a_disk_that_does_not_answer()
        return torch.full((8,), float(index)), torch.tensor([float(index)])

    def a_disk_that_does_not_answer(self) -> None:
        time.sleep(3600)


def train(rank: int, data: Any, total: int = 50, **start: Any) -> None:
    run = ddp.start(total_steps=total, global_batch=12, **start)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), bucket_cap_mb=0.001)
    for step in run.steps(data):
        for x, y in step.batches:
            step.backward(((model(x) - y) ** 2).mean())
        step.commit()


@pytest.mark.fault("T3")
def test_the_rank_that_hangs_ends_with_76_and_its_stacks(gang):
    codes = gang.run(lambda rank: train(rank, Data(rank)), env=HANG)
    assert codes == {0: 75, 1: 76, 2: 75}, gang.log(1)
    log = gang.log(1)
    assert re.search(
        r"rank 1 hangs: it gave no sign of life for \d+\.\d s in phase step \(data\) after step 5;"
        r" the limit is DDPJOB_HANG_STEP_SECONDS=10, ending with exit code 76",
        log,
    )
    assert "in a_disk_that_does_not_answer" in log
