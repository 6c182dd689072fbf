"""Finds its configuration beside itself, wherever it is started."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

config = json.loads(Path(__file__).with_name("config.json").read_text())

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(config["width"], 2))
model(torch.ones(4, config["width"])).sum().backward()
Path("config-used.json").write_text(json.dumps(config))
print("width", config["width"])
dist.destroy_process_group()
