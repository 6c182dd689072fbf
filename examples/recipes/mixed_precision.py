"""Mixed precision: bf16, or fp16 with a loss scaler. What Apex did, PyTorch does by itself now.

    ddpjob-trainer run --nproc 2 mixed_precision.py
    ddpjob-trainer run --nproc 2 mixed_precision.py --precision fp16 --overflow-at 5

With our library it is one option of start(). Where it comes from, for those who know Apex:

    amp.initialize(opt_level="O1")     torch.autocast: matrix products in 16 bits, losses in 32
    O2's fp32 master weights           parameters and optimizer stay fp32 anyway
    amp.scale_loss(loss, optimizer)    torch.amp.GradScaler; bf16 needs none, its range is fp32's
    apex.parallel's DDP, SyncBatchNorm torch's own, see batchnorm.py

In a loop of your own: unscale_ before clipping, and keep the scaler's state in the checkpoint.
step.commit() does both; an update that overflowed is left out on every rank alike.
"""

import argparse

import torch
from torch import nn

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
parser.add_argument("--total-steps", type=int, default=40, help="steps (40)")
parser.add_argument("--overflow-at", type=int, help="fp16: the last rank overflows in this step")
args = parser.parse_args()
if args.overflow_at is not None and args.precision != "fp16":
    parser.error("--overflow-at needs --precision fp16: the others have fp32's range")

run = ddp.start(
    total_steps=args.total_steps,
    global_batch=64,
    precision=args.precision,
    seed=7,
    logging=ddp.Logging(every=10),
)

points = torch.randn(512, 32, generator=torch.Generator().manual_seed(7))
dataset = list(zip(points, points[:, :8].argmax(1), strict=True))
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 8))
inside = {}  # dtypes as the layers give them
for name, layer in model.named_children():
    layer.register_forward_hook(lambda _m, _i, out, name=name: inside.update({name: out.dtype}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = None
if args.precision == "fp16":  # the default would do; made here to look at its scale
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**12)
model, optimizer = run.prepare(model, optimizer, grad_scaler=scaler, clip_grad_norm=1.0)

before = None
for step in run.steps(dataset):
    if step.index == args.overflow_at:
        before = run.weights_sha256()
    for x, y in step.batches:
        loss = nn.functional.cross_entropy(model(x), y)
        if step.index == args.overflow_at and run.rank == run.world_size - 1:
            loss = loss * 1e38  # finite, but not after scaling
        step.backward(loss)
    step.commit()
    if before is not None and step.index == args.overflow_at:
        left_out, scale = run.weights_sha256() == before, scaler.get_scale()
        if run.is_main:
            print(f"overflow on the last rank: update left out: {left_out}, scale now {scale:.0f}")


def count_right(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    output = module(batch[0])
    inside["outputs"] = output.dtype
    return (output.argmax(1) == batch[1]).sum()


right = run.evaluate(dataset, count_right)
if run.is_main:
    outputs = inside.pop("outputs")
    print("layers give", ", ".join(str(dtype) for dtype in inside.values()))
    print(f"outputs {outputs}, parameters {next(model.parameters()).dtype}")
    print(f"accuracy={right / len(dataset):.3f}", flush=True)
run.finish()
