"""The same training as a plain DDP loop, written for speed: no logging in the loop, and no loader
but for a workload that is read by workers.

With --checkpoint it saves and resumes as such loops do, for the comparison of restarts.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = workload.arguments()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
load, net, data = workload.make(args.workload)
model = DistributedDataParallel(net, bucket_cap_mb=load.bucket_cap_mb)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
batch = load.per_rank * world
per_epoch = len(data) // batch

checkpoint = Path(args.checkpoint) if args.checkpoint else None
first = 0
if checkpoint and checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]

record = None
if directory := os.environ.get("BENCH_RECORD"):
    record = os.open(f"{directory}/rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    start = f'"attempt": 1, "round": {restart}, "pid": {os.getpid()}, "total_steps": {args.steps}'
    os.write(record, f'{{"event": "start", "at": {time.monotonic()}, {start}}}\n'.encode())


def loaded() -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches from torch's own workers, epoch after epoch."""
    sampler = DistributedSampler(data, world, rank, drop_last=True)
    loader = DataLoader(
        data, load.per_rank, sampler=sampler, num_workers=load.workers, drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


batches = loaded() if load.workers else None
marks = {}
order = torch.empty(0)
for step in range(first, args.warmup + args.steps + 1):
    if step in (args.warmup, args.warmup + args.steps):
        marks[step] = time.perf_counter()
    epoch, position = divmod(step, per_epoch)
    if batches is not None:
        inputs, targets = next(batches)
    else:
        if position == 0 or step == first:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        at = position * batch + rank * load.per_rank
        inputs, targets = data[order[at : at + load.per_rank]]
    optimizer.zero_grad(set_to_none=True)
    loss = workload.loss_of(model, inputs, targets)
    loss.backward()
    optimizer.step()
    if record is not None:
        facts = f'"step": {step + 1}, "losses": ["{loss.item().hex()}"]'
        os.write(record, f'{{"event": "step", "at": {time.monotonic()}, {facts}}}\n'.encode())
    if checkpoint and rank == 0 and (step + 1) % args.every == 0:
        new = checkpoint.with_suffix(".tmp")
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, new)
        new.replace(checkpoint)
if args.out and rank == 0:
    Path(args.out).write_text(str(marks[args.warmup + args.steps] - marks[args.warmup]))
dist.barrier()
dist.destroy_process_group()
