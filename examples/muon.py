"""Train a residual network on handwritten digits with Muon for matrices and AdamW for the rest.

One model, two optimizers, each with its own learning rate schedule. Needs torch >= 2.9.

    ddpjob-trainer run --nproc 3 muon.py
    ddpjob chaos --nproc 3 --kills 10 muon.py --total-steps 60
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=240, help="steps (240)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
parser.add_argument("--seed", type=int, default=7, help="of weights, data order, dropout (7)")
args = parser.parse_args()

digits = load_digits()
inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(inputs)) % 7 == 0
train_set = TensorDataset(inputs[~held_out], labels[~held_out])
test_set = TensorDataset(inputs[held_out], labels[held_out])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


run = ddp.start(total_steps=args.total_steps, global_batch=args.global_batch, seed=args.seed)

model = nn.Sequential(nn.Linear(64, 128), Block(128), Block(128), nn.Linear(128, 10))
blocks = [p for block in model[1:3] for p in block.parameters()]
matrices = [p for p in blocks if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95)
adamw = torch.optim.AdamW(others, lr=3e-3)
schedules = [
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.total_steps)
    for optimizer in (muon, adamw)
]

model, _ = run.prepare(model, [muon, adamw], scheduler=schedules, bucket_cap_mb=0.1)

for step in run.steps(train_set):
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.commit()


def correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).argmax(1) == y).sum()


accuracy = run.evaluate(test_set, correct) / len(test_set)
if run.is_main:
    print(f"test_accuracy={accuracy:.4f}")
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
