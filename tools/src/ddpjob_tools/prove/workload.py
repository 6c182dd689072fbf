"""Train small models of common kinds, for the checks to kill, hang and compare.

gpu_check.py starts it under a launcher or under chaos.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer import trace
from ddpjob_trainer.environment import TRACE
from ddpjob_trainer.gpu import devices

_SAMPLES, _PER_RANK, _CLASSES, _LENGTH = 512, 8, 10, 16
_HANG_CYCLES = 1 << 40  # of the GPU's clock: minutes
_STEP = 4  # of the hang, and of the look at spares
_SPARES_SECONDS = 120.0


class Block(nn.Module):
    """Attention and a layer after it, with dropout in both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (samples, tokens, width) to the same shape."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        drop = 0.1 if self.training else 0.0
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        return x + functional.dropout(
            self.out(found.transpose(1, 2).flatten(2)), 0.1, self.training
        )


def transformer() -> nn.Module:
    """Make a model of (samples, tokens) -> (samples, classes)."""
    blocks = [Block(64) for _ in range(3)]
    return nn.Sequential(
        nn.Embedding(256, 64), *blocks, nn.Flatten(), nn.Linear(64 * _LENGTH, _CLASSES)
    )


class Both(nn.Module):
    """Add up the logits of a transformer and of a CNN. The CNN sees the tokens as an image.

    One training shows the bits of both: it is starting processes that takes the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = transformer()
        self.pixels = nn.Embedding(256, 16)
        self.cnn = nn.Sequential(
            nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 16, _CLASSES),
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (samples, tokens) to (samples, classes)."""
        image = self.pixels(tokens).unflatten(1, (4, 4)).movedim(-1, 1)
        found: torch.Tensor = self.transformer(tokens) + self.cnn(image)
        return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--model", choices=("both", "transformer", "compiled"), default="transformer"
    )
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--level", default="resume")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--hang", type=int, default=-1, metavar="RANK")
    parser.add_argument("--spares", action="store_true", help="look at the launcher's")
    return parser.parse_args()


def _data() -> TensorDataset:
    torch.manual_seed(8)
    tokens = torch.randint(0, 256, (_SAMPLES, _LENGTH))
    return TensorDataset(tokens, torch.randint(0, _CLASSES, (_SAMPLES,)))


def _hang(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(_HANG_CYCLES)  # type: ignore[no-untyped-call]
    else:
        time.sleep(600)


def _spares() -> dict[str, object]:
    """Count the launcher's waiting processes, and those of them that hold a GPU."""
    marks, until = Path(os.environ[TRACE]), time.monotonic() + _SPARES_SECONDS
    while '"spares"' not in marks.read_text():
        if time.monotonic() > until:
            return {"waiting": 0, "held": 0}
        time.sleep(0.05)
    tasks = Path(f"/proc/{os.getppid()}/task").glob("*/children")
    pids = {int(pid) for task in tasks for pid in task.read_text().split()}
    pids -= set(trace.workers(marks).values())  # they may have come from there, too
    waiting = [pid for pid in pids if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    held = [pid for pid in waiting if devices.driver_opened(str(pid))]
    return {"waiting": len(waiting), "held": len(held)}


def main() -> None:
    """Train as the arguments say. Rank 0 writes what it has seen of the spares to rank-0.json."""
    options = _arguments()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = ddp.start(
        total_steps=options.steps, global_batch=_PER_RANK * world, seed=7, level=options.level,
        precision=options.precision, shards=world,
    )  # fmt: skip
    torch.manual_seed(7)
    net = Both() if options.model == "both" else transformer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, _ = run.prepare(net, optimizer, compile=options.model == "compiled")
    for step in run.steps(_data()):
        if options.spares and rank == 0 and step.index == _STEP:
            (options.out / "rank-0.json").write_text(json.dumps(_spares()))
        if rank == options.hang and step.index == _STEP:
            _hang(run.device)
        for tokens, labels in step.batches:
            step.backward(functional.cross_entropy(model(tokens), labels))
        step.commit()
    run.finish()


if __name__ == "__main__":
    main()
