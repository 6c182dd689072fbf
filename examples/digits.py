"""Train a small convolutional network on scikit-learn's 1,797 handwritten digits.

The same script runs alone, under torchrun, and in a DDPJob, and continues after its newest
snapshot when it is started again. Lines that use `ddp` or `run` are ddpjob's, the rest is PyTorch.

    python digits.py
    ddpjob-trainer run --nproc 3 digits.py
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=360, help="optimizer steps (360)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
parser.add_argument("--seed", type=int, default=7, help="of weights, data order, dropout (7)")
parser.add_argument(
    "--step-seconds", type=float, default=0.0, help="make each step last at least this long (0)"
)
args = parser.parse_args()

# Real images, 8x8 pixels of 0..16; every seventh is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 7 == 0
train_set = TensorDataset(images[~held_out], labels[~held_out])
test_set = TensorDataset(images[held_out], labels[held_out])

run = ddp.start(total_steps=args.total_steps, global_batch=args.global_batch, seed=args.seed)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.total_steps)

# 600 KB of gradients would travel in one bucket; small ones overlap with backward.
model, optimizer = run.prepare(model, optimizer, scheduler=scheduler, bucket_cap_mb=0.1)

for step in run.steps(train_set):
    began = time.monotonic()
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y))
    time.sleep(max(0.0, args.step_seconds - (time.monotonic() - began)))
    step.commit()


def correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).argmax(1) == y).sum()


accuracy = run.evaluate(test_set, correct) / len(test_set)
if run.is_main:
    print(f"test_accuracy={accuracy:.4f}")
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
