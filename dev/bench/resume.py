"""From the SIGKILL of a worker until every rank has finished a new step, by stage.

Ours in place, ours with a new launcher, and torchrun restarting a hand-written loop of the same
model that checkpoints as often. "New launch" is what new pods cost without Kubernetes' own time,
which `status.timings.lastRecoverySeconds` of a DDPJob shows. "Preload" is in place again, of a
script that first imports a module of 3 s, which --preload names; "compiled", of the small GPT of
the examples with --compile and torch's caches warm, "one graph": not cut at DDP's buckets. With
"rescue" a survivor saves the newest step.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from harness import programs, report
from harness.restarts import FOR_EVER, MAX_RESTARTS, Recovery, recoveries, stage_rows

GPT = (str(programs.GPT / "train.py"), "--total-steps", str(FOR_EVER), "--sample", "0", "--compile")
#: Each with its script.
WAYS: dict[str, tuple[str, ...]] = {
    "in place": (programs.program("ours.py"),),
    "in place, rescue": (programs.program("ours.py"),),
    "preload": ("--preload", "heavy", programs.program("imports.py")),
    "new launch": (programs.program("ours.py"),),
    "torchrun": (programs.program("plain.py"),),
    "compiled": GPT,
    "compiled, one graph": (programs.program("one_graph.py"), *GPT),
    "compiled, new launch": GPT,
}
IN_PLACE = ("in place", "in place, rescue", "preload", "compiled", "compiled, one graph")


def measure(
    way: str, nproc: int, workload: str, kills: int, cold: int, patience: float
) -> list[Recovery]:
    sizes = () if GPT[0] in WAYS[way] else ("--workload", workload, "--steps", str(FOR_EVER))
    more = {"rounds": way in IN_PLACE, "torchrun": way == "torchrun"}
    program = (*WAYS[way], *sizes)
    return list(recoveries(way, nproc, program, kills, patience, cold=cold, **more))


def row(name: str, found: Sequence[Recovery]) -> list[str]:
    seconds = [one.seconds for one in found if one.came_back]
    lost = sum(one.lost_rounds for one in found)
    never = len(found) - len(seconds)
    if not seconds:
        return [name, str(len(found)), *"------", str(never)]
    p95 = report.percentile(seconds, 0.95)
    return [
        *(name, str(len(found)), f"{statistics.median(seconds):.3f}", f"{p95:.3f}"),
        f"{min(seconds):.3f}..{max(seconds):.3f}",
        f"{statistics.median(one.past for one in found if one.came_back):.3f}",
        report.spread([one.repeated for one in found if one.came_back], 0),
        *(str(lost), str(never)),
    ]


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cold", type=int, default=8, help="kills before the spares are refilled")
    parser.add_argument("--torchrun-kills", type=int, default=20, help="at most so many (20)")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds to come back (90)")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--workload", default="cnn")
    parser.add_argument("--ways", default=";".join(WAYS), help="(%(default)s)")
    args = parser.parse_args()
    kills, cold = (2, 1) if args.quick else (args.kills, args.cold)
    facts = report.machine()
    groups: dict[str, list[Recovery]] = {}
    for way in args.ways.split(";"):
        again = cold if way in IN_PLACE else 0
        count = min(kills, args.torchrun_kills) if way == "torchrun" else kills
        found = measure(way, args.ranks, args.workload, count, again, args.patience)
        if way in IN_PLACE:
            groups[way] = [one for one in found if one.warm]
            groups[f"{way}, spares not refilled"] = [one for one in found if not one.warm]
        else:
            groups[way] = found
    header = "way | kills | median s | p95 s | range s | past what was done, median s"
    header += " | steps repeated | lost rounds | not back in"
    header += f" {args.patience:g} s"
    print("\n" + report.table(header, [row(name, found) for name, found in groups.items()]))
    ours = {name: found for name, found in groups.items() if name != "torchrun"}
    print("\nmedian seconds of each stage\n")
    print(report.table(("stage", *ours), stage_rows(ours)))
    print(f"\n{args.ranks} ranks, model {args.workload}; torchrun --max-restarts {MAX_RESTARTS}")
    result = {name: [dataclasses.asdict(one) for one in found] for name, found in groups.items()}
    summaries = {
        n: report.summary([r.seconds for r in found if r.came_back]) for n, found in groups.items()
    }
    whole = {"ranks": args.ranks, "workload": args.workload, "summary": summaries}
    report.finish("resume", facts, {**whole, "recoveries": result}, args.json)


if __name__ == "__main__":
    main()
