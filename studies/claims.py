"""DataParallel against DDP, and verdicts on what is said of both.

On the CPU DataParallel's steps are done by hand over threads, with as many threads per replica as a
process of DDP has (programs/replicas.py says why); with --gpus it is nn.DataParallel itself.
Every repeat runs each way once, in an order that turns; ratios are taken within a repeat.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from findings import claims_page, launches
from harness import report

WAYS = ("one", "dp", "ddp")
REPLICAS = 2
FACTS_RANKS = 4
WORLDS = (1, 2, 3, 4)
LEVELS = ("elastic", "resume")
GPU_BATCH = 16  # times the batch of the CPU, which would leave a GPU waiting for its launches

Found = dict[str, Any]


class Ways:
    """All repeats of one way to train."""

    def __init__(self, workloads: Sequence[str], replicas: int, words: Sequence[str]) -> None:
        self.workloads, self.replicas = workloads, replicas
        self.words = ["--workloads", ",".join(workloads), "--replicas", str(replicas), *words]
        self.found: dict[str, list[Found]] = {way: [] for way in WAYS}

    def repeat(self, number: int) -> None:
        turn = number % len(WAYS)
        order = WAYS[turn:] + WAYS[:turn]
        gangs = [
            (self.replicas if way == "ddp" else 1, "parallel.py", ["--way", way, *self.words])
            for way in order
        ]
        for way, one in zip(order, launches.one_after_another(gangs), strict=True):
            self.found[way].append(one)

    def result(self) -> Found:
        return {name: self._of(name) for name in self.workloads}

    def _of(self, name: str) -> Found:
        per_way = {way: [one["workloads"][name] for one in self.found[way]] for way in WAYS}
        seconds = {way: [one["seconds"] for one in ones] for way, ones in per_way.items()}
        found: Found = {
            "steps per second": {way: [1 / s for s in every] for way, every in seconds.items()},
            "ddp of dp": [a / b for a, b in zip(seconds["dp"], seconds["ddp"], strict=True)],
        }
        if "compute" not in per_way["dp"][0]:
            return found
        phases = [one["phases"] for one in per_way["dp"]]
        last = per_way["dp"][-1]
        return found | {
            "speed-up of compute": {
                way: [one["compute"]["speed_up"] for one in per_way[way]] for way in ("dp", "ddp")
            },
            "dp's phases": {
                what: statistics.median(one[what] for one in phases) for what in phases[0]
            },
            **{key: last[key] for key in ("held", "received per step", "replicas made per step")},
        }


def facts(ranks: int, worlds: Sequence[int], levels: Sequence[str]) -> Found:
    """What is counted, not timed; and the weights of one training at several world sizes."""
    cells = [(level, world) for level in levels for world in worlds]
    found, *hashes = launches.one_after_another(
        [
            (ranks, "facts.py", []),
            *((world, "worlds.py", ["--level", level]) for level, world in cells),
        ]
    )
    weights: Found = {level: {} for level in levels}
    for (level, world), digest in zip(cells, hashes, strict=True):
        weights[level][str(world)] = digest
    return {"facts": found, "weights": weights}


def show(ways: Found) -> None:
    rows = [
        [name, way, report.spread(speeds, 1)]
        for name, found in ways.items()
        for way, speeds in found["steps per second"].items()
    ]
    print("\n" + report.table(("model", "way", "steps/s: median (range)"), rows))
    for name, found in ways.items():
        print(f"{name}: DDP is {report.spread(found['ddp of dp'], 2)} times as fast as DP")


def on_gpus(repeats: int, seconds: float, path: Path | None) -> None:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        raise SystemExit(f"--gpus: this machine has {count}; run it where torch sees 2 or more")
    machine = report.machine() | {"gpus": count, "gpu": torch.cuda.get_device_name(0)}
    words = ["--device", "cuda", "--seconds", str(seconds), "--batch-factor", str(GPU_BATCH)]
    ways = Ways(["mlp", "cnn", "rnn"], count, words)
    for number in range(repeats):
        ways.repeat(number)
    result = ways.result()
    show(result)
    peaks = {way: ways.found[way][-1]["gpu peak"] for way in WAYS}
    for way, devices in peaks.items():
        print(f"{way}: peak MB per GPU: {', '.join(f'{n / 1e6:.0f}' for n in devices)}")
    where = path or report.RESULTS / "claims-gpus.json"
    report.finish("claims-gpus", machine, {"ways": result, "gpu peak": peaks}, where)


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="on the clock, per model and way"
    )
    parser.add_argument("--gpus", action="store_true", help="nn.DataParallel itself, and NCCL")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the Markdown page, too")
    parser.add_argument(
        "--scaling",
        type=Path,
        metavar="FILE",
        default=report.ROOT / "studies/scaling.json",
        help="studies/scaling.py's result, which the page needs",
    )
    args = parser.parse_args()
    if args.gpus:
        on_gpus(args.repeats, args.seconds, args.json)
        return
    machine = report.machine()
    if args.quick:
        ways = Ways(["rnn"], REPLICAS, ["--seconds", "0.1"])
        counted = facts(FACTS_RANKS, (1,), ("elastic",))
        ways.repeat(0)
    else:
        ways = Ways(["mlp", "cnn", "rnn"], REPLICAS, ["--seconds", str(args.seconds)])
        counted = facts(FACTS_RANKS, WORLDS, LEVELS)
        for number in range(args.repeats):
            ways.repeat(number)
            print(f"{number + 1}/{args.repeats}", flush=True)
    result = {"replicas": REPLICAS, "ways": ways.result(), **counted}
    show(result["ways"])
    report.finish("claims", machine, result, args.json)
    if args.page:
        scaling = json.loads(args.scaling.read_text())
        args.page.write_text(claims_page.page({"machine": machine, **result}, scaling))


if __name__ == "__main__":
    main()
