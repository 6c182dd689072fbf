"""ZeRO-1: each rank keeps a part of the optimizer's state. The weights are those without it.

    ddpjob-trainer run --nproc 3 zero.py
    ddpjob-trainer run --nproc 3 zero.py --plain

AdamW keeps two numbers per parameter. Plain DDP keeps them on every rank; PyTorch's
ZeroRedundancyOptimizer shares them out: each rank updates its part and sends it to the others.
Parameters and gradients stay whole everywhere, so the largest model that fits grows a little only.
With our library it is prepared like any optimizer, and a snapshot has the whole state, in the form
of plain AdamW: a run may go on with or without ZeRO, by another number of processes too.
"""

import argparse

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--plain", action="store_true", help="AdamW on every rank, to compare with")
parser.add_argument("--total-steps", type=int, default=30, help="steps (30)")
args = parser.parse_args()

run = ddp.start(total_steps=args.total_steps, global_batch=48, log_every=10, seed=7)
model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8))
model.to(run.device)
if args.plain:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
else:  # after start(), which makes the process group; whole tensors go to ranks, by size
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
model, optimizer = run.prepare(model, optimizer, bucket_cap_mb=0.02)

points = torch.randn(480, 32, generator=torch.Generator().manual_seed(7))
for step in run.steps(list(zip(points, points[:, :8].argmax(1), strict=True))):
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.commit()

inner = optimizer if args.plain else optimizer.optim  # this rank's own AdamW
state = sum(v.nbytes for one in inner.state.values() for v in one.values() if v.dim())
shares = [int(run.sum(state if run.rank == r else 0)) for r in range(run.world_size)]
if run.is_main:
    bytes_ = sum(p.nbytes for p in model.parameters())
    print(f"bytes: parameters {bytes_} and gradients {bytes_} on every rank")
    print(f"bytes: optimizer state {shares} by rank")
    print(f"weights_sha256={run.weights_sha256()}", flush=True)
run.finish()
