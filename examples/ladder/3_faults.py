"""Step 3: whatever process is killed, training goes on and ends in the same weights.

Lines that use `ddp` or `run` are ddpjob's, the rest is PyTorch. Step 4, several machines, is this
script as it is: what changes is the manifest.

    ddpjob-trainer run --nproc 3 3_faults.py --snapshots /tmp/snapshots
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=15, help="passes over the training set (15)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
parser.add_argument("--snapshots", help="directory for snapshots (the DDPJob's, else none)")
args = parser.parse_args()

# 1,797 real images, 8x8 pixels of 0..16; every seventh is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 7 == 0
train_set = TensorDataset(images[~held_out], labels[~held_out])
test_set = TensorDataset(images[held_out], labels[held_out])

# The process group, the device, the seeds, and where the snapshots are.
run = ddp.start(
    total_steps=args.epochs * ddp.steps_per_epoch(train_set, args.global_batch),
    global_batch=args.global_batch,
    seed=7,
    level="resume",  # equal bits after a restart; the default on CPUs, on GPUs it is "off", faster
    snapshots=ddp.Snapshots(directory=args.snapshots),
)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)  # DistributedDataParallel; known to snapshots

for step in run.steps(train_set):  # goes on after the newest snapshot
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.commit()  # optimizer; every so many steps a snapshot


def correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).argmax(1) == y).sum()


accuracy = run.evaluate(test_set, correct) / len(test_set)  # each rank a part of the test set
if run.is_main:
    print(f"test_accuracy={accuracy:.4f}")
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
