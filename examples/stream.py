"""Train on a stream that knows its position: no length, no index, but a state in the snapshots.

Each process reads its own part of endless noisy sine waves, and learns to continue them.

    ddpjob-trainer run --nproc 3 stream.py
    ddpjob chaos --nproc 3 --kills 10 stream.py --total-steps 60
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=300, help="steps (300)")
parser.add_argument("--global-batch", type=int, default=96, help="waves per step (96)")
args = parser.parse_args()


class Waves(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A wave of 33 points at a time; the last one is to be guessed."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.drawn = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            pitch, phase = torch.rand(2, generator=self.generator).tolist()
            noise = 0.05 * torch.randn(33, generator=self.generator)
            wave = torch.sin((0.2 + pitch) * torch.arange(33) + 6.3 * phase) + noise
            self.drawn += 1
            yield wave[:32], wave[32:]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.generator.set_state(state["generator"])


run = ddp.start(total_steps=args.total_steps, global_batch=args.global_batch, seed=7)

model = nn.Sequential(
    nn.Linear(32, 128),
    nn.GELU(),
    nn.Dropout(0.1),
    nn.Linear(128, 128),
    nn.GELU(),
    nn.Linear(128, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = run.prepare(model, optimizer, bucket_cap_mb=0.05)

for step in run.steps(Waves(run.rank)):
    for x, y in step.batches:
        step.backward(nn.functional.mse_loss(model(x), y))
    step.commit()

if run.is_main:
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
