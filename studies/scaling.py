"""DDP at 1, 2 and 4 processes: weak and strong scaling, by phase, against the ring's model.

Every repeat runs each number of processes once, so that a slow minute of the machine hits all. The
model is fed by all-reduces and by steps without communication, both measured in the same run; it
also simulates 8 processes. With --page the tables go into a Markdown page.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from findings import launches, ring_model, scaling_page
from findings.ring_model import Measured, Ring
from findings.scaling_page import PHASES
from harness import report

SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
STRONG = 4  # batches of the workload's size, divided among the processes
SIMULATED = 8

Found = dict[str, Any]


def mean_of_ranks(ranks: Sequence[Found]) -> dict[str, float]:
    keys = (*PHASES, "step", "samples")
    return {key: statistics.mean(rank[key] for rank in ranks) for key in keys}


def middle(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in repeats) for key in repeats[0]}


def alone_of(repeats: Sequence[Found]) -> Found:
    """The phases of a step without communication, of the repeats' medians."""
    found: Found = middle(
        [{key: one[key] for key in (*PHASES, "step", "samples")} for one in repeats]
    )
    found["buckets"] = [
        {
            "bytes": column[0]["bytes"],
            "ready": statistics.median(bucket["ready"] for bucket in column),
        }
        for column in zip(*(one["buckets"] for one in repeats), strict=True)
    ]
    return found


class Bench:
    """All repeats of all launches."""

    def __init__(self, workloads: Sequence[str], worlds: Sequence[int], seconds: float) -> None:
        self.workloads, self.worlds, self.seconds = workloads, worlds, seconds
        # [workload][mode][ranks], a list over repeats
        self.steps: dict[str, dict[str, dict[int, list]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        self.alone: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        self.reduced: dict[tuple[int, int], list[float]] = defaultdict(list)

    def repeat(self, sizes: Sequence[int], rings: Sequence[int]) -> None:
        common = ["--workloads", ",".join(self.workloads), "--seconds", str(self.seconds)]
        common += ["--strong", str(STRONG)]
        reduce = ["--sizes", ",".join(map(str, sizes)), "--seconds", str(self.seconds / 8)]
        found = launches.one_after_another(
            [
                *((world, "phases.py", common) for world in self.worlds),
                (1, "phases.py", [*common, "--alone"]),
                *((world, "allreduce.py", reduce) for world in rings),
            ]
        )
        for world, ranks in zip(self.worlds, found, strict=False):
            for name in self.workloads:
                for mode in ("weak", "strong"):
                    self.steps[name][mode][world].append(
                        mean_of_ranks([rank[name][mode] for rank in ranks])
                    )
        [alone] = found[len(self.worlds)]
        for name in self.workloads:
            for samples, one in alone[name].items():
                self.alone[name][samples].append(one)
        for world, seconds_of in zip(rings, found[len(self.worlds) + 1 :], strict=True):
            for size, seconds in seconds_of.items():
                self.reduced[world, int(size)].append(seconds)

    def result(self, cores: int) -> Found:
        points = [
            Measured(world, size, statistics.median(seconds))
            for (world, size), seconds in self.reduced.items()
        ]
        groups = {
            str(world): [p for p in points if p.ranks == world]
            for world in sorted({p.ranks for p in points})
        }
        fits = {name: ring_model.fitted(group) for name, group in groups.items()}
        fits["all"] = ring_model.fitted(points)
        alone = {
            name: {samples: alone_of(repeats) for samples, repeats in by_size.items()}
            for name, by_size in self.alone.items()
        }
        steps = {
            name: {
                mode: {
                    str(world): {
                        "phases": middle(repeats),
                        "step": [one["step"] for one in repeats],
                        "of one process": [
                            first["step"] * (world if mode == "weak" else 1) / one["step"]
                            for first, one in zip(by_world[1], repeats, strict=True)
                        ],
                    }
                    for world, repeats in by_world.items()
                }
                for mode, by_world in modes.items()
            }
            for name, modes in self.steps.items()
        }
        return {
            "cores": cores,
            "all-reduce": [asdict(point) for point in points],
            "fits": fits,
            "alone": alone,
            "steps": steps,
            "model": model(alone, fits, self.worlds, cores),
        }


def model(alone: Found, fits: Found, worlds: Sequence[int], cores: int) -> Found:
    """What the model says of each measured number of processes, and of 8.

    Processes that have a core each take the ring as fitted to 2, which had one each, too.
    """
    found: Found = {}
    for name, sizes in alone.items():
        weak = str(weak_samples(sizes))
        found[name] = {"weak": {}, "strong": {}}
        for world in (*worlds, SIMULATED):
            own_core = world <= cores or world == SIMULATED
            which = fits["2" if own_core else "all"]
            ring = Ring(which["alpha"], which["beta"])
            slower = 1.0 if own_core else world / cores
            strong = str(weak_samples(sizes) * STRONG // world)
            for mode, samples in (("weak", weak), ("strong", strong)):
                found[name][mode][str(world)] = ring_model.step(sizes[samples], ring, world, slower)
    return found


def weak_samples(sizes: Mapping[str, object]) -> int:
    """The workload's own batch: strong scaling's largest is ``STRONG`` of them."""
    return max(map(int, sizes)) // STRONG


def show(result: Found) -> None:
    rows = []
    for name, modes in result["steps"].items():
        for mode, by_world in modes.items():
            for world, found in by_world.items():
                said = result["model"][name][mode][world]
                spread = report.spread([1000 * s for s in found["step"]], 1)
                row = [name, mode, world, spread, report.spread(found["of one process"], 2)]
                rows.append([*row, f"{1000 * said['hidden']:.1f}..{1000 * said['in turn']:.1f}"])
    header = ("model", "scaling", "processes", "ms/step", "of one process", "model: ms")
    print("\n" + report.table(header, rows))
    for name, one in result["fits"].items():
        print(
            f"ring, {name} ranks: alpha {1e6 * one['alpha']:.0f} us, beta"
            f" {one['beta'] / 1e6:.0f} MB/s, off by {100 * one['median error']:.0f} % (median),"
            f" {100 * one['worst error']:.0f} % (worst)"
        )


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default="mlp,cnn,gpt")
    parser.add_argument("--seconds", type=float, default=2.0, help="on the clock, per cell")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the Markdown page, too")
    args = parser.parse_args()
    facts = report.machine()
    if args.quick:
        bench = Bench(["cnn"], (1, 2), 0.1)
        bench.repeat(SIZES[::4], (2,))
    else:
        bench = Bench(args.workloads.split(","), (1, 2, 4), args.seconds)
        for repeat in range(args.repeats):
            bench.repeat(SIZES, (2, 3, 4))
            print(f"{repeat + 1}/{args.repeats}", flush=True)
    result = bench.result(facts["cores"])
    show(result)
    report.finish("scaling", facts, result, args.json)
    if args.page:
        args.page.write_text(scaling_page.page({"machine": facts, **result}))


if __name__ == "__main__":
    main()
