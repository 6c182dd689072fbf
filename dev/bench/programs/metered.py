"""A job whose time is known: each step sleeps, and so does each fetch of every tenth step."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import ddpjob_trainer as ddp

STEPS, STEP_SECONDS, FETCH_SECONDS = int(sys.argv[1]), 0.1, 0.5
BATCH = 3


class Slow(Dataset[torch.Tensor]):
    """Its loader is a disk that hesitates."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> torch.Tensor:
        fetches[0] += 1
        if fetches[0] % 10 == 0:
            time.sleep(FETCH_SECONDS)
        return torch.full((8,), float(index) / 3000)


fetches = [0]
run = ddp.start(total_steps=STEPS, global_batch=BATCH, seed=1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in run.steps(Slow()):
    for x in step.batches:
        step.backward(model(x).square().mean())
    time.sleep(STEP_SECONDS)
    step.commit()
run.finish()
