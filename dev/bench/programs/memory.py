"""A model of so many million parameters; says what memory this process took at which stage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import ddpjob_trainer as ddp


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def from_here() -> int:
    """Forget the peak so far; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return kilobytes("VmRSS")


parser = argparse.ArgumentParser()
parser.add_argument("--millions", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--snapshots", required=True)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
WIDTH = 1000
snapshots = ddp.Snapshots(directory=args.snapshots, every=1000)
run = ddp.start(total_steps=args.steps, global_batch=8, seed=1, snapshots=snapshots)
net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(args.millions)])
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
inputs = torch.randn(64, WIDTH)
built = from_here()
steps = run.steps(inputs)
found = {"built": built}
for step in steps:
    if "resumed" not in found:
        found |= {"resume peak": kilobytes("VmHWM"), "resumed": from_here()}
    for batch in step.batches:
        step.backward(model(batch).pow(2).mean())
    if "first backward peak" not in found:
        found["first backward peak"] = kilobytes("VmHWM")
    step.commit()
    if "first step peak" not in found:
        found["first step peak"] = kilobytes("VmHWM")
        from_here()
    elif "second step peak" not in found:
        found["second step peak"] = kilobytes("VmHWM")
if run.is_main:
    args.out.write_text(json.dumps(found))
run.finish()
