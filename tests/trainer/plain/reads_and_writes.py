"""Reads beside itself and writes there, as if it were still on a laptop."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
with open("data/vocab.json") as file:
    words = json.load(file)
model = DistributedDataParallel(torch.nn.Linear(len(words), 2))
model(torch.ones(4, len(words))).sum().backward()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
    print("weights", list(torch.load("model.pt")))
dist.destroy_process_group()
