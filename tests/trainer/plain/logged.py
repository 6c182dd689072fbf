"""Logs to a file in a folder that it makes, and reads what it has written."""

import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
os.makedirs("logs", exist_ok=True)
logging.basicConfig(filename=f"logs/rank-{rank}.log", level=logging.INFO)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
for step in range(3):
    loss = model(torch.ones(4, 3)).sum()
    loss.backward()
    logging.info("step %d loss %.3f", step, loss.item())
print("lines", len(open(f"logs/rank-{rank}.log").readlines()))
dist.destroy_process_group()
