"""The loop of this library."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import workload

import ddpjob_trainer as ddp

args = workload.arguments()
load, net, data = workload.make(args.workload)
total = args.warmup + args.steps + 1
world = int(os.environ["WORLD_SIZE"])
run = ddp.start(
    total_steps=total, global_batch=load.per_rank * world, seed=workload.SEED, level=args.level
)
model, _ = run.prepare(
    net, torch.optim.AdamW(net.parameters(), lr=1e-3), bucket_cap_mb=load.bucket_cap_mb
)
marks = {}
for step in run.steps(data, workers=load.workers):
    if step.index in (args.warmup, args.warmup + args.steps):
        marks[step.index] = time.perf_counter()
    for inputs, targets in step.batches:
        step.backward(workload.loss_of(model, inputs, targets))
    step.commit()
if args.out and run.is_main:
    Path(args.out).write_text(str(marks[args.warmup + args.steps] - marks[args.warmup]))
run.finish()
