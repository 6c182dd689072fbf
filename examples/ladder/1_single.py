"""Step 1: one process trains a small network on handwritten digits.

All of it is PyTorch. docs/guides/ladder.md shows what each step changes in the one before.

    python 1_single.py
"""

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=15, help="passes over the training set (15)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
args = parser.parse_args()

# 1,797 real images, 8x8 pixels of 0..16; every seventh is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 7 == 0
train_set = TensorDataset(images[~held_out], labels[~held_out])
test_set = TensorDataset(images[held_out], labels[held_out])

torch.manual_seed(7)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

loader = DataLoader(train_set, batch_size=args.global_batch, shuffle=True, drop_last=True)

for epoch in range(args.epochs):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}", flush=True)

with torch.no_grad():
    x, y = (part.to(device) for part in test_set.tensors)
    print(f"test_accuracy={(model(x).argmax(1) == y).float().mean().item():.4f}")
weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
print(f"weights_sha256={hashlib.sha256(weights).hexdigest()}")
