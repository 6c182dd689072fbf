"""Train on handwritten digits that a DataLoader's worker processes shift, turn and stain at random.

The number of workers changes no bit of the result.

    ddpjob-trainer run --nproc 3 loader.py --workers 2
    ddpjob chaos --nproc 3 --kills 10 loader.py --total-steps 60
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=360, help="steps (360)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
parser.add_argument("--workers", type=int, default=2, help="that read for each process (2)")
args = parser.parse_args()


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        image = self.images[index].roll((down, right), (1, 2))
        return image + 0.05 * torch.randn_like(image), self.labels[index]


run = ddp.start(total_steps=args.total_steps, global_batch=args.global_batch, seed=7)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = run.prepare(model, optimizer, bucket_cap_mb=0.05)

loader = DataLoader(
    Augmented(),
    batch_size=args.global_batch // run.world_size,
    shuffle=True,
    num_workers=args.workers,
)
for step in run.steps(loader):
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.commit()

if run.is_main:
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
