"""GPT-2 124M on this machine's GPUs: recovery by stage, speed and kernels of levels, stall.

Recovery is that of examples/ladder/5_gpt/train.py as users have it, from the SIGKILL of a process
until every rank has finished a new step: in place, and by a new launcher, which is what new pods
cost without Kubernetes' own time. The parts come in the order of --parts; each is printed when it
is measured, and is in the JSON if the run is cut off. With --quick a tiny model, on the CPU
where there is no GPU: then the figures only show that it works.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import programs, report, restarts
from mfu import flop_per_token, peak

from ddpjob_trainer.launcher.processes import children

PROGRAM = str(programs.GPT / "train.py")
WARM = 10  # steps before the clock
KERNELS = 25  # rows of a table
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


def steps_of(
    size: Size, nproc: int, steps: int, words: list[str], every: int = 0
) -> dict[str, Any]:
    """Seconds of each step after the warm-up, kernels of a few more; see programs/gpt_steps.py."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        extra = {}
        if every:
            extra["DDPJOB_SNAPSHOT_DIR"] = str(Path(directory) / "snapshots")
            extra["DDPJOB_SNAPSHOT_EVERY_STEPS"] = str(every)
        command = [*programs.launcher(nproc), programs.program("gpt_steps.py")]
        command += ["--steps", str(WARM + steps), "--out", str(out), *size.words(nproc), *words]
        programs.complete(command, extra)
        found: dict[str, Any] = json.loads(out.read_text())
        return {**found, "seconds": found["seconds"][WARM:]}


def stall(seconds: list[float], every: int) -> list[float]:
    """Seconds by which each snapshot holds up training, seen in the two steps after it."""
    usual = statistics.median(seconds)
    after = range(-WARM % every, len(seconds) - 1, every)
    return [sum(max(0.0, s - usual) for s in seconds[n : n + 2]) for n in after]


@dataclass
class Bench:
    """What is measured, on what. ``words``: more for the program. ``found``: for the JSON."""

    size: Size
    nproc: int
    gpu: str
    words: list[str]
    args: Any
    found: dict[str, Any]

    def restart(self) -> None:
        """Recovery in place, by stage."""
        self._recover("in place")

    def launch(self) -> None:
        """Recovery by a new launcher, by stage."""
        self._recover("new launch")

    def _recover(self, way: str) -> None:
        found = []
        steps = ("--total-steps", str(restarts.FOR_EVER))
        program = (PROGRAM, *self.size.words(self.nproc), *steps, *self.words)
        rounds = way == "in place"
        for one in restarts.recoveries(
            way, self.nproc, program, self.args.kills, LIMIT_SECONDS, rounds=rounds
        ):
            found.append(one)
            print("  " + ", ".join(f"{n} {s:.2f}" for n, s in one.stages.items()), flush=True)
        print(f"\n{way}: {report.spread([one.seconds for one in found], 2)} s;", end=" ")
        print(f"{report.spread([one.repeated for one in found], 0)} steps repeated")
        print(report.table(("stage", "median s"), restarts.stage_rows({way: found})), flush=True)
        self.found[f"recovery {way}"] = [asdict(one) for one in found]

    def speed(self) -> None:
        """Tokens per second at levels off and resume, and which kernels make the difference."""
        size, nproc = self.size, self.nproc
        tokens = size.sequences * size.micro_batches * nproc * size.context
        most, rows, kernels = peak(self.gpu), [], {}
        for level in ("off", "resume"):
            one = steps_of(size, nproc, self.args.steps, [*self.words, "--level", level])
            rate = tokens / statistics.median(one["seconds"])
            mfu = f"{rate * size.flop_per_token / most / nproc:.1%}" if most else "-"
            rows.append([level, f"{rate / nproc:,.0f}", mfu])
            kernels[level] = one["kernels"]
            self.found[f"speed {level}"] = {"tokens_per_second": rate, "kernels": one["kernels"]}
        print("\n" + report.table(("level", "tokens/s per process", "MFU"), rows))
        print("\nmilliseconds of a step by kernel, where the levels differ most\n")
        print(
            report.table(("off", "resume", "more", "kernel"), side_by_side(**kernels)), flush=True
        )

    def stall(self) -> None:
        """What a snapshot holds up, beside what the copy takes at the card's own speed."""
        words, every = [*self.words, "--level", "off"], 10 if self.args.quick else 20
        one = steps_of(self.size, self.nproc, self.args.steps, words, every)
        held, usual = stall(one["seconds"], every), statistics.median(one["seconds"])
        self.found["stall"] = {"every": every, "seconds": held, "step": usual, "copy": one["copy"]}
        share = statistics.median(held) / every / usual
        print(f"\na snapshot every {every} steps of {usual * 1000:.0f} ms holds up training by")
        print(f"{report.spread([s * 1000 for s in held], 1)} ms, {share:.2%} (goal 1 %)")
        if copy := one["copy"]:
            rate = copy["bytes"] / copy["seconds"] / 1e9
            took = f"{copy['bytes'] / 2**20:,.0f} MiB in {copy['seconds'] * 1000:.1f} ms"
            print(f"the card copies that state to page-locked memory: {took}, {rate:.1f} GB/s")


def side_by_side(off: dict[str, float], resume: dict[str, float]) -> list[list[str]]:
    """Rows of the kernels that differ most in milliseconds, and of the sum of all."""
    rows = [("all", sum(off.values()), sum(resume.values()))]
    both = [(n, off.get(n, 0.0), resume.get(n, 0.0)) for n in off.keys() | resume.keys()]
    rows += sorted(both, key=lambda row: -abs(row[2] - row[1]))[:KERNELS]
    return [[f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}", name[:80]] for name, a, b in rows]


PARTS = {
    "restart": Bench.restart,
    "speed": Bench.speed,
    "stall": Bench.stall,
    "launch": Bench.launch,
}


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="--parts speed")
    parser.add_argument("--steps", type=int, default=100, help="of each measurement (100)")
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
    if args.quick:
        args.steps = min(args.steps, 40)
    nproc = args.nproc or gpus or 2
    found = {"nproc": nproc, "parameters": size.parameters}
    bench = Bench(size, nproc, gpu, [] if args.quick else ["--compile"], args, found)
    print(f"{nproc} processes, {gpu}, {size.parameters:,} parameters")
    for part in ["speed"] if args.profile else args.parts.split(","):
        PARTS[part](bench)
        report.finish("gpu", facts, found, args.json)
    if args.quick:
        print("--quick: these figures show that it works, and nothing else")


if __name__ == "__main__":
    children.adopt_orphans()  # a killed launcher's workers end with us at the latest
    main()
