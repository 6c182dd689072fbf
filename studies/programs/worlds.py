"""The same training at any number of processes, the whole batch kept; the hash of its weights."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
import workload

import ddpjob_trainer as ddp

GLOBAL_BATCH = 24
parser = argparse.ArgumentParser()
parser.add_argument("--level", required=True)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
load, net, data = workload.make("cnn")
run = ddp.start(
    total_steps=args.steps, global_batch=GLOBAL_BATCH, seed=workload.SEED, level=args.level
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model, _ = run.prepare(net, optimizer, bucket_cap_mb=load.bucket_cap_mb)
for step in run.steps(data):
    for inputs, targets in step.batches:
        step.backward(workload.loss_of(model, inputs, targets))
    step.commit()
if run.is_main:
    found = hashlib.sha256()
    for tensor in net.state_dict().values():
        found.update(tensor.numpy().tobytes())
    args.out.write_text(json.dumps(found.hexdigest()))
run.finish()
