"""The small loop of a GPT: seconds of each step, then the milliseconds of a step by kernel."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from corpus import Sequences
from gpt import GPT

import ddpjob_trainer as ddp

PROFILED = 3  # steps

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, help="before the profile")
parser.add_argument("--out", type=Path)
parser.add_argument("--level")
parser.add_argument("--compile", action="store_true")
for name in ("layers", "heads", "width", "context", "vocabulary", "global-batch", "micro-batches"):
    parser.add_argument(f"--{name}", type=int)
args, _ = parser.parse_known_args()

run = ddp.start(
    total_steps=args.steps + PROFILED,
    global_batch=args.global_batch,
    micro_batches=args.micro_batches,
    precision="bf16" if torch.cuda.is_available() else "fp32",
    level=args.level,
)
cuda = run.device.type == "cuda"
torch.set_float32_matmul_precision("high")
model = GPT(args.layers, args.heads, args.width, args.context, args.vocabulary)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=cuda)
model, optimizer = run.prepare(model, optimizer, clip_grad_norm=1.0, compile=args.compile)
activity = torch.profiler.ProfilerActivity
profile = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])


def copied() -> dict[str, Any] | None:
    """How long a copy of model and optimizer to page-locked memory takes, the best of three."""
    if not cuda:
        return None
    state = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    there = torch.empty(state, dtype=torch.uint8, device=run.device)
    here = torch.empty(state, dtype=torch.uint8, pin_memory=True)
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return {"bytes": state, "seconds": min(took)}


seconds, since = [], time.perf_counter()
for step in run.steps(Sequences(args.context, None, 0)):
    if step.index == args.steps:
        profile.start()
    for ids in step.batches:
        step.backward(model(ids))
    step.commit()
    now = time.perf_counter()
    seconds.append(now - since)
    since = now
if cuda:
    torch.cuda.synchronize()
profile.stop()
if run.is_main:
    kernels = {
        one.key: (one.self_device_time_total if cuda else one.self_cpu_time_total) / PROFILED / 1000
        for one in profile.key_averages()
    }
    found = {"seconds": seconds[: args.steps], "kernels": kernels, "copy": copied()}
    args.out.write_text(json.dumps(found))
run.finish()
