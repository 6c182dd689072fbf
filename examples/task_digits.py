"""The same training as digits.py, for the task runner: no loop, only what is to be trained.

The runner is ddpjob's, the rest is PyTorch.

    ddpjob-trainer task --nproc 3 task_digits.py --total-steps 360 --global-batch 96 --seed 7
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

# Real images, 8x8 pixels of 0..16; every seventh is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 7 == 0


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def build_dataset():
    return TensorDataset(images[~held_out], labels[~held_out])


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


# --- From here on all is optional -----------------------------------------------------------


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def build_scheduler(optimizer, total_steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=total_steps)


def build_eval_dataset():
    return TensorDataset(images[held_out], labels[held_out])


def evaluate(model, batch):
    x, y = batch
    return (model(x).argmax(1) == y).sum()
