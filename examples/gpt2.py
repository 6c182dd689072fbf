"""Train a GPT-2 (124M parameters unless told otherwise): bf16, fused AdamW, SDPA, torch.compile.

    ddpjob-trainer run --nproc 8 gpt2.py --data tokens.bin --compile
    ddpjob-trainer run --nproc 3 gpt2.py --layers 2 --heads 2 --width 32 --context 16 \
        --vocabulary 64 --global-batch 6 --micro-batches 1 --total-steps 20         # anywhere

tokens.bin: token ids as little-endian uint16, one after another, as nanoGPT and llm.c write them
(a file of llm.c begins with 1024 bytes of its own: --skip 1024). Without it, made-up tokens.
"""

import argparse
import math
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, help="file of tokens (made-up tokens)")
parser.add_argument("--skip", type=int, default=0, help="bytes before the first token (0)")
parser.add_argument("--total-steps", type=int, default=19073, help="steps (19073: 10B tokens)")
parser.add_argument("--global-batch", type=int, default=512, help="sequences per step (512)")
parser.add_argument("--micro-batches", type=int, default=8, help="per process and step (8)")
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--context", type=int, default=1024, help="tokens per sequence (1024)")
parser.add_argument("--vocabulary", type=int, default=50304, help="a multiple of 64 (50304)")
parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
parser.add_argument("--level", choices=("off", "resume", "elastic"), help="(off on CUDA)")
parser.add_argument("--compile", action="store_true", help="torch.compile")
parser.add_argument("--lr", type=float, default=6e-4)
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()


class Tokens(Dataset):
    """Sequences of context + 1 tokens: each predicts the one after it."""

    def __init__(self) -> None:
        if args.data is not None:
            self.ids = numpy.memmap(args.data, dtype="<u2", mode="r", offset=args.skip)
        else:  # a walk with steps of 1 to 3: there is something to learn
            steps = numpy.random.default_rng(args.seed).integers(1, 4, 4096 * (args.context + 1))
            self.ids = (steps.cumsum() % min(args.vocabulary, 50257)).astype("<u2")

    def __len__(self) -> int:
        return len(self.ids) // (args.context + 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        at = index * (args.context + 1)
        return torch.from_numpy(self.ids[at : at + args.context + 1].astype(numpy.int64))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = args.width
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, args.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Sequences of context + 1 tokens -> their mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.layers) ** deep)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        # Within the model, so that logits of vocabulary size are not made fp32 on their way out.
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


run = ddp.start(
    total_steps=args.total_steps,
    global_batch=args.global_batch,
    micro_batches=args.micro_batches,
    precision=args.precision,
    level=args.level,
    seed=args.seed,
)
if torch.cuda.is_available():
    torch.set_float32_matmul_precision("high")

model = GPT2()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
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

for step in run.steps(Tokens()):
    for ids in step.batches:
        step.backward(model(ids))
    step.commit()

if run.is_main:
    print(f"parameters={sum(p.numel() for p in model.parameters())}")
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
