"""Where the time of DDP's steps goes: data, forward, backward, exposed communication, optimizer.

Each process is bound to one core, rank after rank, so that 2 processes on 2 cores have one each.
A communication hook, which does what DDP does without one, notes when a bucket is ready. With
--alone it hands the bucket back as it is: the same training without any communication.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BLOCK = 5  # steps between two looks at the clock that all ranks agree on; the first block warms up


class Clock:
    """The marks of one step, in seconds since it began."""

    def __init__(self) -> None:
        self.began = 0.0
        self.buckets: list[dict[str, float]] = []  # of this step: bytes, ready, done
        self.gradients: list[dict[str, float]] = []

    def now(self) -> float:
        return time.perf_counter() - self.began

    def begin(self) -> None:
        self.began = time.perf_counter()
        self.buckets, self.gradients = [], []


def averaging(clock: Clock, alone: bool) -> Callable[[object, Any], Any]:
    def hook(_, bucket):  # type: ignore[no-untyped-def] # DDP reads the annotations of a hook
        mark = {"bytes": bucket.buffer().nbytes, "ready": clock.now()}
        clock.buckets.append(mark)
        if alone:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        def average(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            mark["done"] = clock.now()
            return future.value()[0].div_(dist.get_world_size())

        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(average)

    return hook


def measure(name: str, samples: int, alone: bool) -> dict[str, Any]:
    """Medians over steps, in seconds; the step is this rank's."""
    load, net, data = workload.make(name)
    model = DistributedDataParallel(net, bucket_cap_mb=load.bucket_cap_mb)
    clock = Clock()
    model.register_comm_hook(None, averaging(clock, alone))
    if args.record:
        watch(net, clock)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    steps: list[dict[str, Any]] = []
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(dist.get_rank()))
    first, begun = True, time.perf_counter()
    while first or agreed(time.perf_counter() - begun) < args.seconds:
        for _ in range(BLOCK):
            steps.append(one_step(model, optimizer, data, order, samples, clock, len(steps)))
        if first:
            steps.clear()  # buckets are rebuilt, memory is touched, optimizer state is made
        first, begun = False, time.perf_counter() if first else begun
    if args.record:
        return sorted(steps, key=lambda step: step["step"])[len(steps) // 2]
    keys = [key for key in steps[0] if key not in ("buckets", "gradients")]
    found = {key: statistics.median(step[key] for step in steps) for key in keys}
    columns = zip(*(step["buckets"] for step in steps), strict=True)
    found["buckets"] = [
        {
            "bytes": column[0]["bytes"],
            "ready": statistics.median(mark["ready"] for mark in column),
        }
        for column in columns
    ]
    return found | {"samples": samples, "steps": len(steps)}


def watch(net: nn.Module, clock: Clock) -> None:
    for name, parameter in net.named_parameters():

        def ready(tensor: torch.Tensor, name: str = name) -> None:
            clock.gradients.append({"name": name, "bytes": tensor.nbytes, "ready": clock.now()})

        parameter.register_post_accumulate_grad_hook(ready)


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, order: torch.Tensor,
    samples: int, clock: Clock, number: int,
) -> dict[str, Any]:  # fmt: skip
    clock.begin()
    first = number * samples % (len(data) - samples)
    inputs, targets = data[order[first : first + samples]]
    read = clock.now()
    optimizer.zero_grad()
    loss = workload.loss_of(model, inputs, targets)
    forward = clock.now()
    loss.backward()
    backward = clock.now()
    last = max(mark["ready"] for mark in clock.buckets)
    optimizer.step()
    end = clock.now()
    for mark in clock.buckets:
        mark["ready"] -= forward
        if "done" in mark:
            mark["done"] -= forward
    for mark in clock.gradients:
        mark["ready"] -= forward
    return {
        "data": read,
        "forward": forward - read,
        "backward": last - forward,  # until the last bucket is ready
        "exposed": backward - last,  # then nothing is left but to wait, and to copy back
        "optimizer": end - backward,
        "step": end,
        "buckets": clock.buckets,
        "gradients": clock.gradients,
    }


def agreed(value: float) -> float:
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def cells() -> list[tuple[str, str, int, bool]]:
    """(workload, key, samples per process, without communication)"""
    world, found = dist.get_world_size(), []
    for name in args.workloads.split(","):
        each = workload.WORKLOADS[name].per_rank
        if args.alone:
            sizes = sorted({each, *(each * args.strong // w for w in (1, 2, 4, 8))})
            found += [(name, str(size), size, True) for size in sizes]
        else:
            found.append((name, "weak", each, False))
            found.append((name, "strong", each * args.strong // world, False))
    return found


parser = argparse.ArgumentParser()
parser.add_argument("--workloads", default="mlp,cnn,gpt")
parser.add_argument("--seconds", type=float, default=2.0, help="per workload and way to scale")
parser.add_argument("--strong", type=int, default=4, help="batches that strong scaling divides")
parser.add_argument("--alone", action="store_true", help="without communication, several batches")
parser.add_argument("--record", action="store_true", help="one whole step, the middle one")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
if args.record:
    name = args.workloads
    mine: Any = measure(name, workload.WORKLOADS[name].per_rank, False)
else:
    mine = {}
    for name, key, samples, alone in cells():
        mine.setdefault(name, {})[key] = measure(name, samples, alone)
everyone: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    args.out.write_text(json.dumps(everyone))
dist.barrier()
dist.destroy_process_group()
