"""BatchNorm over several processes: whose running statistics count, and SyncBatchNorm.

    ddpjob-trainer run --nproc 3 batchnorm.py

A BatchNorm layer normalises by the mean of the batch of its process and keeps running statistics in
buffers. Those have no gradient, so all-reduce does not reach them. First plain DDP, then ours:

broadcast_buffers=True    DDP's default: each forward begins with rank 0's buffers on all ranks.
                          What others see is lost, and until the next forward theirs differ by
                          one batch: only rank 0's are worth saving
broadcast_buffers=False   each rank keeps its own, and they drift apart
ours                      as DDP's default, once per step; evaluate(), save() and snapshots take
                          rank 0's on every rank
SyncBatchNorm             one mean over all processes, for collectives in each forward and backward.
                          PyTorch has it for GPUs only
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpjob_trainer as ddp

world = int(os.environ.get("WORLD_SIZE", "1"))
run = ddp.start(total_steps=10, global_batch=32 * world, seed=7, logging=ddp.Logging(every=10))


def everyones(layer: nn.BatchNorm1d) -> str:
    """The running means of all ranks."""
    found = [None] * run.world_size
    dist.all_gather_object(found, round(float(layer.running_mean[0]), 3))
    return "running means " + ", ".join(map(str, found))


def say(line: str) -> None:
    if run.is_main:
        print(line, flush=True)


warnings.filterwarnings("ignore", "`broadcast_buffers`")  # newer PyTorch: forward_sync_buffers

# --- Plain DDP: rank r sees numbers around r, so the mean over all is (world - 1) / 2 ------------
for broadcast in (True, False):
    layer = nn.BatchNorm1d(1).to(run.device)
    model = DistributedDataParallel(layer, broadcast_buffers=broadcast)
    generator = torch.Generator().manual_seed(run.rank)
    for _ in range(10):
        model((run.rank + torch.randn(64, 1, generator=generator)).to(run.device)).sum().backward()
    say(f"DDP, broadcast_buffers={broadcast!s:<5}: {everyones(layer)}")

# --- SyncBatchNorm ------------------------------------------------------------------------------
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
sync = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1)).to(run.device)
try:
    sync((run.rank + torch.randn(64, 1)).to(run.device))
    say(f"SyncBatchNorm, one step    : {everyones(sync)}")
except ValueError as error:
    say(f"SyncBatchNorm refuses      : {error}")
try:  # what prepare() does with it
    model, optimizer = run.prepare(net, optimizer, sync_batchnorm=True)
except ddp.ConfigError as error:
    say(f"ours, sync_batchnorm=True  : {error}")
    model, optimizer = run.prepare(net, optimizer)

# --- Ours -----------------------------------------------------------------------------------------
data = torch.randn(128 * world, 4, generator=torch.Generator().manual_seed(7)) + 3
for step in run.steps(data):
    for batch in step.batches:
        step.backward(model(batch).square().mean())
    step.commit()
layer = model.module[1]
say(f"ours, after the last step  : {everyones(layer)}")
run.evaluate(data, lambda module, batch: module(batch).sum())
say(f"ours, after evaluate()     : {everyones(layer)}")
run.finish()
