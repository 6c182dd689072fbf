"""Takes options, and a folder for its results, which it makes."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--out", default="results")
args = parser.parse_args()

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
os.makedirs(args.out, exist_ok=True)
torch.save(model.module.state_dict(), os.path.join(args.out, f"rank-{dist.get_rank()}.pt"))
print("rate", args.lr)
dist.destroy_process_group()
