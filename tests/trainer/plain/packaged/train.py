"""Is started as a module, and imports its own package in both ways."""

from importlib import resources

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from packaged import net

from .net import make

width = int(resources.files("packaged").joinpath("width.txt").read_text())
dist.init_process_group("gloo")
model = DistributedDataParallel(make(width))
model(torch.ones(4, width)).sum().backward()
print("package", net.make is make, width)
dist.destroy_process_group()
