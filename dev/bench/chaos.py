"""Hundreds of kills: `ddpjob chaos` at 3, 4 and 5 ranks, one seed after the other.

Ends with exit code 1 when any run differs from its undisturbed one in a single bit.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import programs, report

HOWS = ("in place", "new launch", "went on", "finished", "")


def one_run(nproc: int, seed: int, kills: int, steps: int, workload: str) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, "-m", "ddpjob_tools", "chaos", "--nproc", str(nproc)]
        command += ["--kills", str(kills), "--seed", str(seed), "--json", str(out)]
        command += [programs.program("ours.py"), "--workload", workload, "--steps", str(steps)]
        began = time.monotonic()
        done = subprocess.run(command, env=programs.environment(), check=False)
        if not out.exists():
            return {"nproc": nproc, "seed": seed, "identical": False, "kills": [], "launches": 0}
        result = json.loads(out.read_text())
        result["minutes"] = round((time.monotonic() - began) / 60, 2)
        assert (done.returncode == 0) == result["identical"]
        return result


def row(result: dict) -> list[object]:
    hows = collections.Counter(kill["how"] for kill in result["kills"])
    in_place = [kill["seconds"] for kill in result["kills"] if kill["how"] == "in place"]
    return [
        result["nproc"],
        result["seed"],
        len(result["kills"]),
        *(hows[how] for how in HOWS),
        report.spread(in_place, 2),
        result.get("steps_again", "-"),
        "identical" if result["identical"] else "DIFFERENT",
    ]


def main() -> int:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=24, help="per run (24)")
    parser.add_argument("--seeds", default="1,2,3", help="for each number of ranks (1,2,3)")
    parser.add_argument("--ranks", default="3,4,5")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workload", default="cnn")
    args = parser.parse_args()
    facts = report.machine()
    ranks = [3] if args.quick else [int(n) for n in args.ranks.split(",")]
    seeds = [1] if args.quick else [int(n) for n in args.seeds.split(",")]
    kills, steps = (4, 40) if args.quick else (args.kills, args.steps)
    results = [one_run(n, s, kills, steps, args.workload) for n in ranks for s in seeds]
    again = "killed again first"
    header = (
        "ranks",
        "seed",
        "kills",
        *HOWS[:-1],
        again,
        "in place: s (range)",
        "steps again",
        "verdict",
    )
    print("\n" + report.table(header, [row(result) for result in results]))
    every = [kill for result in results for kill in result["kills"]]
    came: collections.Counter[str] = collections.Counter()
    for result in results:
        came.update(result.get("rescues", {}))
    kinds = collections.Counter(kill["signal"] for kill in every)
    hit = collections.Counter("launcher" if k["victim"] < 0 else "rank" for k in every)
    same = sum(result["identical"] for result in results)
    print(f"\n{len(every)} kills ({dict(kinds)}, {dict(hit)}): {same} of {len(results)} identical")
    if came:
        print(
            "\n" + report.table("a rescue came to | kills", [[*one] for one in came.most_common()])
        )
    totals = {"kills": len(every), "identical": same == len(results)}
    report.finish("chaos", facts, {**totals, "runs": results}, args.json)
    return 0 if same == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
