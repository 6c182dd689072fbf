"""A loop of one's own, as many have it, right without ``--mistakes``; else with some.

Epochs are shuffled, dropout draws random numbers, Adam has a state, lr falls by a schedule.
"""

import argparse
import os
import random

import torch
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistakes", default="")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--out", default="checkpoints")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
mistakes = set(options.mistakes.split(","))

if "no-seed" not in mistakes:
    torch.manual_seed(1)
    random.seed(1)
rows = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(96, 8, generator=rows), torch.randint(0, 3, (96,), generator=rows))
model = nn.Sequential(
    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)
)
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
path = f"{options.out}/last.pt"
step = 0


def random_states():
    return {"torch": torch.get_rng_state(), "python": random.getstate()}


def save():
    os.makedirs(options.out, exist_ok=True)
    named = dict(model.named_parameters()) if "no-buffers" in mistakes else model.state_dict()
    kept = {"step": step, "model": named, "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "random": random_states()}  # fmt: skip
    kept = {name: one for name, one in kept.items() if f"no-{name}" not in mistakes}
    torch.save(kept, path + ".new")
    os.replace(path + ".new", path)


if os.path.exists(path):
    kept = torch.load(path, weights_only=False)
    model.load_state_dict(kept["model"], strict="no-buffers" not in mistakes)
    if "optimizer" in kept:
        optimizer.load_state_dict(kept["optimizer"])
    if "scheduler" in kept:
        scheduler.load_state_dict(kept["scheduler"])
    step = kept["step"]
    torch.set_rng_state(kept["random"]["torch"])
    random.setstate(kept["random"]["python"])

per_epoch = len(data) // 8
while step < options.epochs * per_epoch:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step // per_epoch))
    if "unseeded-order" in mistakes:
        order = torch.randperm(len(data))
    order, done = order.tolist(), step % per_epoch
    batches = [order[i : i + 8] for i in range(done * 8, len(data), 8)]
    for batch in batches:
        x, y = data[batch]
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 5 == 0:
            save()
print("loss", loss.item())
