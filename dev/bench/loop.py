"""Steps per second of our loop against a hand-written torchrun + DDP loop of the same model.

Every repeat runs each side once, in an order that turns, so that a slow minute of the machine hits
all of them. The ratio is taken within a repeat. Nothing is saved on either side. The clock starts
when both sides run evenly: our launcher's spares import torch meanwhile, once. Workload "slow"
needs 5 ms per sample, read by four workers per rank on both sides: torch's DataLoader, and ours.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

from harness import programs, report

PLAIN = "plain DDP"
LEVELS = ("off", "resume", "elastic")
STEPS = {"cnn": 600, "mlp": 200, "gpt": 120, "slow": 150}
WARM_UP = {"cnn": 500, "mlp": 120, "gpt": 60, "slow": 200}


def steps_per_second(side: str, workload: str, nproc: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        common = ["--workload", workload, "--steps", str(steps), "--out", str(out)]
        common += ["--warmup", str(WARM_UP[workload])]
        if side == PLAIN:
            command = [*programs.torchrun(nproc), programs.program("plain.py"), *common]
        else:
            command = [*programs.launcher(nproc), programs.program("ours.py"), *common]
            command += ["--level", side]
        try:
            programs.complete(command)
        except RuntimeError as error:
            if not out.exists():
                raise
            # Seen of plain DDP: gloo's threads abort the process when its work is done.
            print(f"{side}: it was measured, and failed afterwards: {error}", flush=True)
        return steps / float(out.read_text())


def compare(workload: str, nproc: int, repeats: int, steps: int, levels: list[str]) -> dict:
    sides = [PLAIN, *levels]
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    turns = itertools.cycle(range(len(sides)))
    for repeat in range(repeats):
        turn = next(turns)
        for side in sides[turn:] + sides[:turn]:
            speeds[side].append(steps_per_second(side, workload, nproc, steps))
        print(f"{workload}, {nproc} ranks: {repeat + 1}/{repeats}", flush=True)
    pairs = {level: [*zip(speeds[level], speeds[PLAIN], strict=True)] for level in levels}
    return {
        "workload": workload,
        "ranks": nproc,
        "steps_per_second": speeds,
        "ratio": {level: [ours / plain for ours, plain in of] for level, of in pairs.items()},
        "added_ms": {
            level: [1e3 / ours - 1e3 / plain for ours, plain in of] for level, of in pairs.items()
        },
    }


def rows(results: list[dict]) -> list[list[str]]:
    return [
        [
            result["workload"],
            result["ranks"],
            side,
            report.spread(speeds, 1),
            report.spread(result["ratio"].get(side, []), 3),
            report.spread(result["added_ms"].get(side, []), 2),
        ]
        for result in results
        for side, speeds in result["steps_per_second"].items()
    ]


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--workloads", default="cnn,mlp,gpt,slow")
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--levels", default=",".join(LEVELS))
    args = parser.parse_args()
    facts = report.machine()
    repeats = 1 if args.quick else args.repeats
    ranks = ["3"] if args.quick else args.ranks.split(",")
    results = [
        compare(
            workload,
            int(nproc),
            repeats,
            STEPS[workload] // (5 if args.quick else 1),
            args.levels.split(","),
        )
        for workload in (["cnn"] if args.quick else args.workloads.split(","))
        for nproc in ranks
    ]
    which = ("steps/s", "of plain DDP", "ms added per step")
    header = ("model", "ranks", "loop", *(f"{one}: median (range)" for one in which))
    print("\n" + report.table(header, rows(results)))
    for names, goal in ((("cnn", "mlp", "gpt"), 0.99), (("slow",), 0.98)):
        medians = [
            statistics.median(values)
            for result in results
            for level, values in result["ratio"].items()
            if level in ("off", "resume") and result["workload"] in names
        ]
        if medians:
            print(
                f"\n{', '.join(names)}: lowest median ratio of levels off and resume:"
                f" {min(medians):.3f} (goal {goal})"
            )
    report.finish("loop", facts, {"results": results}, args.json)


if __name__ == "__main__":
    main()
