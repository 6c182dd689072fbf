"""Steps per second of one model trained in one of three ways, and what the way costs.

one: one process, the whole batch. dp: replicas in threads of one process, by hand on the CPU
(replicas.py), nn.DataParallel itself on GPUs. ddp: a process per replica. All take the same whole
batch per step, with one intra-op thread per replica.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workload
from replicas import ByHand, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_SECONDS = 0.3
Step = Callable[[torch.Tensor, torch.Tensor], object]


def agreed(value: float) -> float:
    """Rank 0's value."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor([value], dtype=torch.float64, device=device())
    dist.broadcast(shared, 0)
    return float(shared)


def device() -> torch.device:
    if args.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def wait() -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], limit: float) -> float:
    """Seconds per call, of as many calls as take about that long; the same number on all ranks."""
    warm, begun, spent = 0, time.perf_counter(), 0.0
    while warm < 3 or spent < WARM_SECONDS:
        work()
        wait()
        warm += 1
        spent = agreed(time.perf_counter() - begun)
    count = max(3, int(limit * warm / spent))
    begun = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return agreed((time.perf_counter() - begun) / count)


def measure(name: str) -> dict[str, Any]:
    load, net, data = workload.make(name)
    samples = load.per_rank * args.batch_factor
    whole = samples * args.replicas
    chosen = torch.arange(whole) % len(data)
    inputs, targets = (part.to(device()) for part in data[chosen])
    net.to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    found: dict[str, Any] = {}
    one = one_step(net, optimizer)
    if args.way == "one":
        step = one
    elif args.way == "dp":
        if args.device == "cuda":
            step = one_step(nn.DataParallel(net), optimizer)
        else:
            by_hand = ByHand(net, args.replicas)

            def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
                optimizer.zero_grad()
                by_hand.step(inputs, targets, nn.functional.cross_entropy)
                begun = time.perf_counter()
                optimizer.step()
                by_hand.seconds["optimizer"] += time.perf_counter() - begun
    else:
        rank = dist.get_rank()
        inputs, targets = (t.chunk(args.replicas)[rank] for t in (inputs, targets))
        ids = [device()] if args.device == "cuda" else None
        step = one_step(DistributedDataParallel(net, ids), optimizer)
    found["seconds"] = seconds_of(lambda: step(inputs, targets), args.seconds)
    if args.way == "dp" and args.device == "cpu":
        found |= bytes_of(by_hand, optimizer)
    if args.way != "one" and args.device == "cpu":
        found["compute"] = compute(name, inputs, targets)
    return found


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def bytes_of(by_hand: ByHand, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    steps = by_hand.made // args.replicas
    state = [v for entry in optimizer.state.values() for v in entry.values()]
    by_hand.held[0]["optimizer state"] = sum(v.nbytes for v in state)
    return {
        "phases": {what: seconds / steps for what, seconds in by_hand.seconds.items()},
        "replicas made per step": by_hand.made / steps,
        "received per step": [
            {what: count / steps for what, count in one.items()} for one in by_hand.received
        ],
        "held": by_hand.held,
    }


def compute(name: str, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Forward and backward alone, no replicas made, no gradient moved: all replicas at once against
    one with nothing beside it. ``at_once`` and ``alone``: seconds; ``speed_up``: at most replicas.
    """
    copies = [workload.make(name)[1] for _ in range(args.replicas)]
    samples = len(inputs) // (args.replicas if args.way == "dp" else 1)
    part, answers = inputs[:samples], targets[:samples]

    def work(model: nn.Module) -> bool:
        loss = nn.functional.cross_entropy(model(part), answers)
        torch.autograd.grad(loss, list(model.parameters()))
        return True

    limit = args.seconds / 2
    if args.way == "dp":
        alone = seconds_of(lambda: work(copies[0]), limit)
        calls = [lambda model=model: work(model) for model in copies]
        at_once = seconds_of(lambda: together(calls), limit)
    else:
        count = max(3, int(agreed(limit / timed(work, copies[0], 3))))
        dist.barrier()
        alone = timed(work, copies[0], count) if dist.get_rank() == 0 else 0.0
        dist.barrier()  # the others wait here, asleep
        at_once = agreed(timed(work, copies[0], count))
        alone = agreed(alone)
        dist.barrier()
    return {"alone": alone, "at_once": at_once, "speed_up": args.replicas * alone / at_once}


def timed(work: Callable[[nn.Module], object], model: nn.Module, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        work(model)
    return (time.perf_counter() - begun) / count


parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=("one", "dp", "ddp"), required=True)
parser.add_argument("--workloads", required=True)
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--seconds", type=float, default=2.0)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--batch-factor", type=int, default=1, help="times the workload's batch")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
torch.set_num_threads(1)
if args.way == "ddp":
    if args.device == "cuda":
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
results: dict[str, Any] = {"workloads": {}}
for name in args.workloads.split(","):
    results["workloads"][name] = measure(name)
if args.device == "cuda":
    count = torch.cuda.device_count()
    results["gpu peak"] = [torch.cuda.max_memory_allocated(i) for i in range(count)]
    if dist.is_initialized():  # each process has touched its own
        everyone: list[Any] = [None] * args.replicas
        dist.all_gather_object(everyone, results["gpu peak"])
        results["gpu peak"] = [peaks[rank] for rank, peaks in enumerate(everyone)]
if not dist.is_initialized() or dist.get_rank() == 0:
    args.out.write_text(json.dumps(results))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
