"""One rank of dev/bench/snapshot.py's second table: our loop, a state of some size, every or Auto.

A step is a sleep, as the CPU's part of a GPU's is. After each the newest snapshot that counts is
looked at: what a kill then would lose.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", default="0", help="steps, Auto, or 0 for no snapshot")
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    args = parser.parse_args()
    every = int(args.every) if args.every.isdigit() else args.every
    place = args.out.parent / f"snapshots-{args.out.name}" if every else None
    kept = ddp.Snapshots(directory=place, every=every) if every else ddp.Snapshots()
    run = ddp.start(total_steps=args.steps, global_batch=6, snapshots=kept)
    model = torch.nn.Linear(8, 8)
    wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {"state": torch.zeros(args.megabytes << 18)}
    run.register("state", state)
    ended, lost = [], []
    manager = run._process.snapshots
    for step in run.steps(TensorDataset(torch.zeros(6 * args.steps, 8))):
        ended.append(time.perf_counter())
        lost.append(step.index - max(0, manager.newest))
        for (x,) in step.batches:
            step.backward(wrapped(x).sum())
        time.sleep(args.step_seconds)
        step.commit()
    run.finish()
    if run.rank == 0:
        saves = len(list(place.glob("*/step-*.json"))) if place else 0
        args.out.write_text(json.dumps({"ended": ended, "lost": lost, "kept": saves}))


main()
