"""Seconds of one gloo all-reduce at several sizes: the median of many, of rank 0.

Each process is bound to one core, as in phases.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--sizes", required=True, help="bytes, with commas")
parser.add_argument("--seconds", type=float, default=0.3, help="per size")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
found = {}
for size in map(int, args.sizes.split(",")):
    tensor = torch.ones(size // 4)
    count = torch.tensor([0])
    for _ in range(2):  # once to warm up and to see how many fit
        seconds = []
        for _ in range(int(count) or 5):
            tensor.fill_(1.0)
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - begun)
        count.fill_(max(5, min(400, int(args.seconds / statistics.median(seconds)))))
        dist.broadcast(count, 0)
    assert float(tensor[0]) == dist.get_world_size()
    found[size] = statistics.median(seconds)
if dist.get_rank() == 0:
    args.out.write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
