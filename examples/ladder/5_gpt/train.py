"""Step 5: a GPT learns Python's own library, byte by byte, and then writes a little text itself.

    ddpjob-trainer run --nproc 3 train.py                            # small, on any CPU: minutes
    ddpjob-trainer run --nproc 8 train.py --size 124m --compile --data tokens.bin      # 8 GPUs

tokens.bin: token ids as little-endian uint16, one after another, as nanoGPT and llm.c write them
(a file of llm.c begins with 1024 bytes of header: --skip 1024). The text at the end is then token
ids. Lines that use `ddp` or `run` are ddpjob's, the rest is PyTorch.
"""

import argparse
import math
from pathlib import Path

import torch
from corpus import Sequences
from gpt import GPT, GPT2
from mfu import Speed, flop_per_token
from torch.utils.data import Subset

import ddpjob_trainer as ddp

#: What each size takes unless an option says otherwise; 124m is 10B tokens of GPT-2's.
SIZES = {
    "small": {
        "layers": 4, "heads": 4, "width": 96, "context": 64, "vocabulary": 256,
        "total_steps": 1000, "global_batch": 48, "micro_batches": 1, "lr": 3e-3,
        "precision": "fp32",
    },
    "124m": {
        **GPT2,
        "total_steps": 19073, "global_batch": 512, "micro_batches": 8, "lr": 6e-4,
        "precision": "bf16",
    },
}  # fmt: skip

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=SIZES, default="small", help="sets the defaults (small)")
for name, value in SIZES["small"].items():
    help_ = " or ".join(f"{size[name]}" for size in SIZES.values())
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"({help_})")
parser.add_argument("--data", type=Path, help="file of tokens (bytes of Python's library)")
parser.add_argument("--skip", type=int, default=0, help="bytes before its first token (0)")
parser.add_argument("--level", choices=("off", "resume", "elastic"), help="(resume; off on CUDA)")
parser.add_argument("--compile", action="store_true", help="torch.compile")
parser.add_argument("--snapshots", help="directory for snapshots (the DDPJob's, else none)")
parser.add_argument("--sample", type=int, default=300, help="tokens to write at the end (300)")
parser.add_argument("--seed", type=int, default=7, help="of weights, data order, sample (7)")
parser.set_defaults(**SIZES[parser.parse_args().size])
args = parser.parse_args()

run = ddp.start(
    total_steps=args.total_steps,
    global_batch=args.global_batch,
    micro_batches=args.micro_batches,  # whose gradients are added up before they travel
    precision=args.precision,
    level=args.level,
    seed=args.seed,
    snapshots=ddp.Snapshots(directory=args.snapshots),
)
if torch.cuda.is_available():
    torch.set_float32_matmul_precision("high")

sequences = Sequences(args.context, args.data, args.skip)
if run.sum(sequences.checksum()) != run.world_size * sequences.checksum():
    raise SystemExit("the ranks read different texts: give all of them the same image, or --data")

model = GPT(args.layers, args.heads, args.width, args.context, args.vocabulary)
parameters = sum(p.numel() for p in model.parameters())
flop = flop_per_token(
    parameters - model.places.weight.numel(), args.layers, args.width, args.context
)
matrices = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=args.lr,
    betas=(0.9, 0.95),
    fused=run.device.type == "cuda",
)
warm = max(1, min(700, args.total_steps // 10))


def rate(step: int) -> float:
    """Of --lr: up for a while, then down along a cosine to a tenth."""
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, args.total_steps - warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
model, optimizer = run.prepare(
    model, optimizer, scheduler=scheduler, clip_grad_norm=1.0, compile=args.compile
)
gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
speed = Speed(args.global_batch * args.context, flop, gpu, run.world_size)

for step in run.steps(sequences):
    for ids in step.batches:
        step.backward(model(ids))
    step.commit()
    if run.is_main and gpu and (rate := speed.after_step()):
        print(f"step {run.finished_steps}: {rate}", flush=True)

some = Subset(sequences, range(0, len(sequences), max(1, len(sequences) // 256)))
batch = args.global_batch // args.micro_batches // run.world_size
loss = run.evaluate(some, lambda model, ids: model(ids), batch_size=batch, reduce="mean")
if run.is_main:
    with run.evaluating() as gpt:
        generator = torch.Generator(run.device).manual_seed(args.seed)
        prompt = torch.tensor([list(b"def ")], device=run.device)
        written = gpt.sample(prompt, args.sample, generator)[0].tolist()
    print("".join(map(chr, written)) if args.data is None else written)
    print(f"loss={loss:.4f}")
    print(f"parameters={parameters}")
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
