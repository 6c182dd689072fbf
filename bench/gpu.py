"""GPT-2 124M on this machine's GPUs: tokens per second, MFU, a snapshot's stall, levels, recovery.

The program is examples/ladder/5_gpt/train.py as users have it. Recovery is from the SIGKILL of a
process to the first new step that rank 0 tells of: in place, and by a new launcher, which is what
new pods cost without Kubernetes' own time. With --quick a tiny model, on the CPU where there is no
GPU: then the figures only show that it works.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import programs, report
from mfu import flop_per_token, peak

from ddpjob_trainer import trace
from ddpjob_trainer.environment import TRACE
from ddpjob_trainer.launcher.processes import children

PROGRAM = str(programs.GPT / "train.py")
WARM = 10  # steps before the clock
LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Size:
    """A model and a step. ``sequences``: per process and micro batch."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50304
    sequences: int = 64
    micro_batches: int = 1

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.context + 2) * self.width

    @property
    def flop_per_token(self) -> float:
        places = self.context * self.width
        return flop_per_token(self.parameters - places, self.layers, self.width, self.context)

    def words(self, nproc: int) -> list[str]:
        batch = self.sequences * self.micro_batches * nproc
        given = {
            "layers": self.layers, "heads": self.heads, "width": self.width,
            "context": self.context, "vocabulary": self.vocabulary,
            "size": "124m", "sample": 0, "global-batch": batch, "micro-batches": self.micro_batches,
        }  # fmt: skip
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


TINY = Size(layers=2, heads=2, width=32, context=16, vocabulary=256, sequences=4)


class Training:
    """One training of the program, in a directory of its own, launched once or more."""

    def __init__(
        self, size: Size, nproc: int, directory: Path, *words: str, every: int = 0
    ) -> None:
        self._events = directory / "events.jsonl"
        self._log = directory / "log"
        self.trace = directory / "trace"
        self._env = programs.environment({TRACE: str(self.trace)})
        if every:
            self._env |= {
                "DDPJOB_SNAPSHOT_DIR": str(directory / "snapshots"),
                "DDPJOB_SNAPSHOT_EVERY_STEPS": str(every),
            }
        options = ("--events", str(self._events))
        self._command = [*programs.launcher(nproc, *options), PROGRAM, *size.words(nproc), *words]

    def launch(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)

    def complete(self) -> None:
        """Raise RuntimeError with the last output if it fails."""
        with self.launch() as process:
            try:
                code = process.wait(LIMIT_SECONDS)
            finally:
                process.kill()
        if code:
            raise RuntimeError(f"exit code {code}\n{self._log.read_text()[-3000:]}")

    def events(self, name: str) -> list[dict[str, Any]]:
        if not self._events.exists():
            return []
        lines = self._events.read_text().splitlines()
        return [
            e for line in lines if line.endswith("}") and (e := json.loads(line))["event"] == name
        ]

    def wait(self, process: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_SECONDS
        while not done():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"it did not get on\n{self._log.read_text()[-3000:]}")
            time.sleep(0.005)


def seconds_of(size: Size, nproc: int, steps: int, words: list[str], every: int = 0) -> list[float]:
    """Of each step after the warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        training = Training(
            size, nproc, Path(directory), "--total-steps", str(steps), *words, every=every
        )
        training.complete()
        return [event["seconds"] for event in training.events("step")][WARM:]


def stall(seconds: list[float], every: int) -> float:
    """Share of the time that snapshots take, seen in the two steps after each."""
    usual = statistics.median(seconds)
    first = WARM + 1
    after = [s for n, s in enumerate(seconds, first) if n > every and (n - 1) % every < 2]
    return sum(max(0.0, s - usual) for s in after) / sum(seconds)


def recoveries(size: Size, nproc: int, kills: int, words: list[str], way: str) -> list[float]:
    """Seconds from a SIGKILL to the first new step that is told."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        training = Training(
            size, nproc, Path(directory), "--total-steps", "1000000", *words, every=20
        )
        process = training.launch()
        try:
            for number in range(kills):
                steps = len(training.events("step"))
                known = len(training.events("snapshot"))
                training.wait(process, lambda n=steps: len(training.events("step")) > n + 40)  # type: ignore[misc]
                training.wait(process, lambda n=known: len(training.events("snapshot")) > n)  # type: ignore[misc]
                resumed = len(training.events("resume"))
                at = time.time()
                if way == "in place":
                    os.kill(trace.workers(training.trace)[number % nproc], signal.SIGKILL)
                else:
                    process.kill()
                    process.wait()
                    process = training.launch()

                def stepped(since: int = resumed) -> list[float]:
                    """Return when steps of the new life ended: the old one may report late."""
                    resumes = training.events("resume")[since:]
                    first = resumes[-1]["time"] if resumes else math.inf
                    return [e["time"] for e in training.events("step") if e["time"] > first]

                training.wait(process, lambda told=stepped: bool(told()))  # type: ignore[misc]
                found.append(stepped()[0] - at)
                print(f"{way}: {number + 1}/{kills} {found[-1]:.2f} s", flush=True)
        finally:
            process.kill()
            process.wait()
    return found


def measure(size: Size, nproc: int, args: Any, gpu: str) -> Mapping[str, Any]:
    common = [] if args.quick else ["--compile"]
    steps = 40 if args.quick else args.steps
    tokens = size.sequences * size.micro_batches * nproc * size.context
    speeds: dict[str, float] = {}
    for level in ("off", "resume"):
        seconds = seconds_of(size, nproc, steps, [*common, "--level", level])
        speeds[level] = tokens / statistics.median(seconds)
        print(f"level {level}: {speeds[level]:,.0f} tokens/s", flush=True)
    every = 10 if args.quick else 50
    share = stall(seconds_of(size, nproc, steps, [*common, "--level", "off"], every), every)
    most = peak(gpu)
    return {
        "parameters": size.parameters,
        "tokens_per_second": speeds,
        "mfu": most and speeds["off"] * size.flop_per_token / most / nproc,
        "level_resume": speeds["resume"] / speeds["off"],
        "snapshot_every": every,
        "stall": share,
        "recovery_seconds": {
            way: recoveries(size, nproc, args.kills, common, way)
            for way in ("in place", "new launch")
        },
    }


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64, help="per process and micro batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--nproc", type=int, help="one per GPU; without a GPU 2")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus and not args.quick:
        print("no GPU: nothing is measured; --quick runs a tiny model to show that it works")
        return
    gpu = torch.cuda.get_device_name(0) if gpus else "none"
    facts = {**report.machine(), "gpu": gpu, "gpus": gpus}
    size = TINY if args.quick else Size(sequences=args.sequences, micro_batches=args.micro_batches)
    nproc = args.nproc or gpus or 2
    found = measure(size, nproc, args, gpu)
    each = found["tokens_per_second"]["off"] / nproc
    rows = [
        ["tokens/s per process, level off", f"{each:,.0f}", "500,000 per H200"],
        ["MFU", f"{found['mfu']:.1%}" if found["mfu"] else "-", ""],
        ["level resume, of off", f"{found['level_resume']:.3f}", ""],
        [
            f"stall, a snapshot every {found['snapshot_every']} steps",
            f"{found['stall']:.2%}",
            "1 %",
        ],
    ]
    for way, seconds in found["recovery_seconds"].items():
        rows.append([f"recovery {way}, s", report.spread(seconds, 2), ""])
    print("\n" + report.table(("", "measured", "goal"), rows))
    print(f"\n{nproc} processes, {gpu}, {found['parameters']:,} parameters")
    if args.quick:
        print("--quick: these figures show that it works, and nothing else")
    report.finish("gpu", facts, {"nproc": nproc, **found}, args.json)


if __name__ == "__main__":
    children.adopt_orphans()  # a killed launcher's workers end with us at the latest
    main()
