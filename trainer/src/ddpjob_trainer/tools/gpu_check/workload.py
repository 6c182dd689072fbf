"""The trainings that the checks kill, hang, time and compare: small, and of what people train.

`--plain` is the same loop by hand on DistributedDataParallel, for a comparison of speed and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer import gpu_devices, trace
from ddpjob_trainer.environment import TRACE

_SAMPLES, _PER_RANK, _CLASSES, _LENGTH = 512, 8, 10, 16
_HANG_CYCLES = 1 << 40  # of the GPU's clock: minutes
_SPARES_SECONDS = 120.0
#: Of torch's warning in set_sync_debug_mode().
_SYNC = "synchronizing CUDA operation"

Warned = list[warnings.WarningMessage]


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
    """Tokens -> logits of the whole sequence's class."""
    blocks = [Block(64) for _ in range(3)]
    return nn.Sequential(
        nn.Embedding(256, 64), *blocks, nn.Flatten(), nn.Linear(64 * _LENGTH, _CLASSES)
    )


def cnn() -> nn.Module:
    """Tokens, as an image -> logits."""
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Unflatten(1, (4, 4)), Channels(),
        nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 16, _CLASSES),
    )  # fmt: skip


class Channels(nn.Module):
    """(samples, height, width, channels) -> channels second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the class says."""
        return x.movedim(-1, 1)


def wide(width: int) -> nn.Module:
    """Many parameters, little to compute."""
    return nn.Sequential(
        nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * _LENGTH, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _CLASSES),
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=("cnn", "transformer", "wide"), default="transformer")
    parser.add_argument("--width", type=int, default=512, help="of model wide")
    parser.add_argument("--batch", type=int, default=_PER_RANK, help="samples per process")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--level", default="resume")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--every", type=int, help="steps between snapshots")
    parser.add_argument("--lose-each", action="store_true", help="round n ends with rank n's death")
    parser.add_argument("--hang", type=int, default=-1, metavar="RANK")
    parser.add_argument("--until-spares", action="store_true", help="look at them, in step 4")
    parser.add_argument("--plain", action="store_true")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(7)
    made: dict[str, Callable[[], nn.Module]] = {
        "cnn": cnn, "transformer": transformer, "wide": lambda: wide(options.width)
    }  # fmt: skip
    return made[options.model]()


def _data(least: int = 0) -> TensorDataset:
    torch.manual_seed(8)
    count = max(_SAMPLES, least)
    tokens = torch.randint(0, 256, (count, _LENGTH))
    return TensorDataset(tokens, torch.randint(0, _CLASSES, (count,)))


def _disturb(options: argparse.Namespace, step: int, device: torch.device) -> None:
    rank, round_ = int(os.environ["RANK"]), int(os.environ["DDPJOB_ROUND"])
    if options.lose_each and rank == round_ and step == 4 + 2 * round_:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == options.hang and step == 4:
        if device.type == "cuda":
            torch.cuda._sleep(_HANG_CYCLES)  # type: ignore[no-untyped-call]
        else:
            time.sleep(600)


def _spares() -> dict[str, object]:
    """How many of the launcher's processes wait for a call, and how many of these hold a GPU."""
    marks, until = Path(os.environ[TRACE]), time.monotonic() + _SPARES_SECONDS
    while '"spares"' not in marks.read_text():
        if time.monotonic() > until:
            return {"waiting": 0, "held": 0}
        time.sleep(0.05)
    tasks = Path(f"/proc/{os.getppid()}/task").glob("*/children")
    pids = {int(pid) for task in tasks for pid in task.read_text().split()}
    pids -= set(trace.workers(marks).values())  # they may have come from there, too
    waiting = [pid for pid in pids if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    held = [pid for pid in waiting if gpu_devices.driver_opened(str(pid))]
    return {"waiting": len(waiting), "held": len(held)}


class _Clock:
    """Seconds of each step; the peak of memory, and the waits for the GPU, so far."""

    def __init__(self, device: torch.device, warned: Warned) -> None:
        self._cuda = device.type == "cuda"
        self._warned = warned
        self.marks: list[float] = []
        self.peaks: list[int] = []
        self.syncs: list[int] = []

    def step(self) -> None:
        self.marks.append(time.monotonic())
        self.syncs.append(sum(_SYNC in str(one.message) for one in self._warned))
        if self._cuda:
            self.peaks.append(torch.cuda.max_memory_allocated())

    def found(self) -> dict[str, object]:
        if self._cuda:
            torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        seconds = [after - before for before, after in pairs]
        return {"seconds": seconds, "peaks": self.peaks, "syncs": self.syncs}


def _train(options: argparse.Namespace, warned: Warned) -> dict[str, object]:
    world = int(os.environ["WORLD_SIZE"])
    run = ddp.start(
        total_steps=options.steps, global_batch=options.batch * world, seed=7, level=options.level,
        precision=options.precision, snapshot_every=options.every, shards=world,
    )  # fmt: skip
    net = _model(options)
    model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    clock = _Clock(run.device, warned)
    seen: dict[str, object] = {}
    for step in run.steps(_data(options.batch * world)):
        if options.until_spares and run.is_main and step.index == 4:
            seen = _spares()
        _disturb(options, step.index, run.device)
        clock.step()
        for tokens, labels in step.batches:
            step.backward(functional.cross_entropy(model(tokens), labels))
        step.commit()
    found = {"sha256": run.weights_sha256(), **seen, **clock.found()}
    run.finish()
    return found


def _plain(options: argparse.Namespace, warned: Warned) -> dict[str, object]:
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    net = _model(options).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    clock = _Clock(device, warned)
    batches = _batches(device, options.batch)
    for _ in range(options.steps):
        clock.step()
        tokens, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(tokens), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = clock.found()
    dist.barrier()
    dist.destroy_process_group()
    return found


def _batches(device: torch.device, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    data, at = _data(size * world), rank * size
    while True:
        yield tuple(part.to(device, non_blocking=True) for part in data[at : at + size])
        at = (at + world * size) % (len(data) - size + 1)


def main() -> None:
    """See the module's own words."""
    options = _arguments()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = (_plain if options.plain else _train)(options, caught)
    (options.out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
