"""One rank of dev/bench/snapshot.py: steps of a given length, a snapshot every few, ways to save.

``--real`` trains on the CPU; otherwise a step is a sleep, as the CPU's part of a GPU's step is,
and an exchange between the ranks. A GPU's copy engine takes no core from anybody: the thread that
emulates it gets what others leave (``--copy-nice``). Before the steps with snapshots come as
many without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPT2

import ddpjob_trainer as ddp
from ddpjob_trainer.comm.world import World


class Way:
    """One way to save, by save(step) and finish(). What it need not do it leaves out."""

    skipped: int
    durable: list[float]  # seconds
    verified: ClassVar[list[float]] = []  # the same, until read back; of ours alone

    def warm_up(self) -> None: ...

    def wait_for_readers(self) -> None: ...

    def report(self) -> list[float]:
        """What it adds to the exchange at the end of each step."""
        return [0.0]

    def learn(self, sums: list[float]) -> None: ...


class Ours(Way):
    def __init__(self, run: ddp.Run, state: Any, _: Path) -> None:
        self._snapshots, self._state = run._process.snapshots, state
        self.skipped, self.durable = 0, []
        progress = run._process.progress
        progress.save_took = self.durable.append  # type: ignore[method-assign]
        progress.reading_back_took = self.verified.append  # type: ignore[method-assign]
        progress.count = self._count  # type: ignore[method-assign]
        self._snapshots.restore(state, CONFIG, run.rank)

    def _count(self, name: str) -> None:
        self.skipped += name == "snapshots_skipped"

    def warm_up(self) -> None:
        self._snapshots.prepare(self._state)

    def wait_for_readers(self) -> None:
        self._snapshots.wait_for_readers()

    def report(self) -> list[float]:
        return self._snapshots.report()

    def learn(self, sums: list[float]) -> None:
        self._snapshots.receive(sums)

    def save(self, step: int) -> None:
        self._snapshots.save(step, self._state, CONFIG, last=False)

    def finish(self) -> None:
        self._snapshots.wait_durable()


class Synchronous(Way):
    """torch.save of everything by rank 0, while the others wait for it in the next exchange."""

    def __init__(self, run: ddp.Run, state: Any, directory: Path) -> None:
        self._rank, self._state, self._directory = run.rank, state, directory
        self.skipped, self.durable = 0, []
        self._threads: list[threading.Thread] = []

    def save(self, step: int) -> None:
        if self._rank != 0:
            return
        begun = time.perf_counter()
        path = self._directory / f"{step}.pt"
        torch.save(plain_state(self._state), path)
        self._threads.append(threading.Thread(target=self._sync, args=(path, begun)))
        self._threads[-1].start()

    def _sync(self, path: Path, begun: float) -> None:
        """Who uses torch.save does not wait for the disk; so it is not in the stall."""
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        self.durable.append(time.perf_counter() - begun)

    def finish(self) -> None:
        for thread in self._threads:
            thread.join()


class Checkpoint(Way):
    """torch.distributed.checkpoint.async_save; skipped while one is running.

    With its own process group: on the default one its exchanges mix with those of training,
    and with gloo both then wait for ever.
    """

    def __init__(self, run: ddp.Run, state: Any, directory: Path) -> None:
        self._state, self._directory = state, directory
        self.skipped, self.durable = 0, []
        self._pending: Future[Any] | None = None
        self._busy = False  # on any rank
        self._group = torch.distributed.new_group(backend="gloo")

    def report(self) -> list[float]:
        return [float(self._pending is not None and not self._pending.done())]

    def learn(self, sums: list[float]) -> None:
        self._busy = sums[0] > 0

    def save(self, step: int) -> None:
        if self._busy:
            self.skipped += 1
            return
        begun = time.perf_counter()
        found = dcp.async_save(
            plain_state(self._state),
            checkpoint_id=str(self._directory / str(step)),
            process_group=self._group,
        )
        self._pending = getattr(found, "upload_completion", found)
        self._pending.add_done_callback(lambda _: self.durable.append(time.perf_counter() - begun))

    def finish(self) -> None:
        if self._pending is not None:
            self._pending.result()


class Floor(Way):
    """No snapshot at all: a process beside each rank writes as many bytes past the page cache.

    What it stalls, the cores and the disk take from the way that saves in the background.
    """

    PROGRAM = """
import mmap, os, sys
block = mmap.mmap(-1, 1 << 22)
block[:] = os.urandom(len(block))
for line in sys.stdin:
    path, size = line.split()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(0, int(size), len(block)):
        os.write(fd, block)
    os.fsync(fd)
    os.close(fd)
    print(flush=True)
"""

    def __init__(self, run: ddp.Run, state: Any, directory: Path) -> None:
        self._directory, self._rank = directory, run.rank
        self._bytes = sum(t.nbytes for t in tensors(plain_state(state))) // run._process.world.size
        self.skipped, self.durable = 0, []
        self._begun: list[float] = []

    def warm_up(self) -> None:
        self._writer = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        for index, _ in enumerate(self._writer.stdout):
            self.durable.append(time.perf_counter() - self._begun[index])

    def save(self, step: int) -> None:
        self._begun.append(time.perf_counter())
        self._writer.stdin.write(f"{self._directory}/{step}-{self._rank} {self._bytes}\n")
        self._writer.stdin.flush()

    def finish(self) -> None:
        self._writer.stdin.close()
        self._listener.join()


def plain_state(state: Any) -> dict[str, Any]:
    return {
        "model": state.module.state_dict(),
        "optimizer": state.registered["optimizer"].state_dict(),
    }


WAYS: dict[str, type[Way]] = {
    "ours": Ours,
    "torch.save": Synchronous,
    "dcp": Checkpoint,
    "floor": Floor,
}
CONFIG = {"seed": 0, "global_batch": 1, "samples": 1, "level": "off"}


def real_step(model: torch.nn.Module, optimizer: Any, way: Any, tokens: int) -> None:
    model(torch.randint(0, GPT2["vocabulary"], (1, tokens + 1))).backward()
    way.wait_for_readers()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(
    way: Way, step: Callable[[int], None], world: World, first: int, count: int
) -> list[float]:
    """Seconds of each step, exchange included."""
    seconds = []
    for index in range(first, first + count):
        begun = time.perf_counter()
        step(index)
        way.learn(world.sum(way.report()))
        seconds.append(time.perf_counter() - begun)
    return seconds


def announce(directory: Path) -> None:
    """Have memory measured from here on; goes on once the first measurement is there."""
    (directory / "pids").mkdir(exist_ok=True)
    (directory / "pids" / str(os.getpid())).touch()
    while (directory / "measured").exists() and not (
        directory / "measured" / str(os.getpid())
    ).exists():
        time.sleep(0.01)


def lower_copying(nice: int) -> None:
    for thread in threading.enumerate():
        if thread.name == "ddpjob-snapshots":
            os.setpriority(os.PRIO_PROCESS, thread.native_id, nice)


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Its state appears with the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--staging", default="thread")
    parser.add_argument("--copy-nice", type=int, default=19)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(1)
    run = ddp.start(
        total_steps=1, global_batch=60, level="off",
        snapshots=ddp.Snapshots(directory=args.directory, every=1, staging=args.staging),
    )  # fmt: skip
    model, optimizer = GPT(**GPT2), None
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, _ = run.prepare(model, optimizer)
    fill_optimizer(optimizer)
    way = WAYS[args.way](run, run._ready("the benchmark").state, args.directory)
    world = run._process.world

    def compute() -> None:
        if args.real:
            real_step(wrapped, optimizer, way, args.tokens)
        else:
            time.sleep(args.step_seconds)
            way.wait_for_readers()

    def saving(index: int) -> None:
        compute()
        if index % args.every == 0:
            way.save(index)

    announce(args.out.parent)
    way.warm_up()
    if not args.real:
        lower_copying(args.copy_nice)
    measure(way, lambda _: compute(), world, 1, args.every)  # buffers are being allocated
    quiet = measure(way, lambda _: compute(), world, 1, args.steps)
    (args.out.parent / "saving").touch()
    begun = time.perf_counter()
    busy = measure(way, saving, world, 1, args.steps)
    wall = time.perf_counter() - begun
    way.finish()
    if run.rank == 0:
        result = {
            "quiet": quiet, "steps": busy, "wall": wall, "durable": way.durable,
            "verified": way.verified, "skipped": way.skipped,
            "state_bytes": sum(t.nbytes for t in tensors(plain_state(run._ready("").state))),
        }  # fmt: skip
        args.out.write_text(json.dumps(result))
    with contextlib.suppress(Exception):
        run.finish()


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor once."""
    found: dict[int, torch.Tensor] = {}

    def visit(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found[part.data_ptr()] = part
        elif isinstance(part, dict):
            for inner in part.values():
                visit(inner)

    visit(value)
    return list(found.values())


main()
