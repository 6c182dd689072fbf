"""Distributed SGD by hand: each rank has a part of the data, and gradients are averaged.

    ddpjob-trainer run --nproc 4 sgd.py
    torchrun --nproc-per-node 4 sgd.py --epochs 5

Plain torch.distributed, nothing of ours and no DistributedDataParallel. The same training is done
by 1, by 2, by 4, ... processes, as groups of this launch, and reaches the same loss: a batch of 96
is 96 samples, however divided, and the mean of equal shares' means is the mean of all. Equal
means up to rounding, not bit for bit: with two shares 48 + 48 samples are added up where one
process adds up 96, and float additions in another order round otherwise. (level="elastic" of
ddpjob's library adds up in one order for any number of processes: docs/guides/determinism.md.)
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, by the optimizer, it would hold the group for ever
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10, help="passes over the data (10)")
parser.add_argument("--batch", type=int, default=96, help="samples per step, of all ranks (96)")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)

# Points in 32 dimensions, of a class each: the same on every rank, by the seed.
torch.manual_seed(7)
points = torch.randn(960, 32)
classes = (points @ torch.randn(32, 10)).argmax(1).to(device)
points = points.to(device)


def train(group: dist.ProcessGroup, processes: int) -> tuple[float, torch.Tensor]:
    """Train by ranks 0 to processes - 1, which call this; return loss over all data, weights."""
    # Every rank begins with the same weights. Here by the seed; DDP broadcasts rank 0's instead.
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    share = args.batch // processes
    for epoch in range(args.epochs):
        # The same order everywhere; of each batch every rank takes a part that no other takes.
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(points) - args.batch + 1, args.batch):
            mine = order[start + rank * share : start + (rank + 1) * share].to(device)
            optimizer.zero_grad()
            cross_entropy(model(points[mine]), classes[mine]).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)  # the sum of all ranks' gradients
                parameter.grad /= processes  # their mean
            optimizer.step()  # the same step from the same weights: nobody sends weights

    # So the weights must still be equal, bit for bit, on all ranks: check it.
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    lowest, highest = flat.clone(), flat.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(lowest, highest)
    with torch.no_grad():
        return float(cross_entropy(model(points), classes)), flat


for processes in [2**n for n in range(world.bit_length()) if 2**n <= world]:
    assert args.batch % processes == 0, f"--batch {args.batch} cannot be shared by {processes}"
    group = dist.new_group(list(range(processes)))  # called by all, also those outside it
    if rank < processes:
        loss, weights = train(group, processes)
        if processes == 1:
            alone, by_one = loss, weights
        if rank == 0:
            assert abs(loss - alone) <= 1e-4 * alone  # seen: equal in 7 digits
            off = float((weights - by_one).abs().max())
            print(f"{processes} processes: loss {loss:.7f}, weights off by {off:.0e}", flush=True)
    dist.barrier()
del group  # who holds a group keeps its threads
dist.destroy_process_group()
