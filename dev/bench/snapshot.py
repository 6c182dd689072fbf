"""What snapshots cost: ours, torch.save by rank 0, torch.distributed.checkpoint, in one run.

A 124M-parameter GPT with AdamW (1.49 GB of state), a snapshot every 10 steps. A GPU's step is
emulated: the process sleeps for its length, and our staging runs in a thread meanwhile, as the
GPU's copy engine would, at the lowest priority, since that engine takes no core from anybody. Real
training on this CPU is measured as well. Ways take turns; all write to the same disk. The floor
saves nothing: other processes write as many bytes meanwhile.

A second table: what fixed numbers of steps and everySteps: Auto cost, and what a kill at any step
would lose, with a small and a large state.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness import programs, report

WAYS = ("ours", "torch.save", "dcp", "floor")
GOAL = 0.01


def pss(pid: int) -> int:
    """Proportional set size in bytes: shared pages count for each process in part."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line[:4] == "Pss:")


def family(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def watch_memory(process: subprocess.Popen, directory: Path) -> dict[str, float]:
    """Peak of each rank's memory over what it was before the first snapshot was prepared."""
    base: dict[int, int] = {}
    peak: dict[int, int] = {}
    while process.poll() is None:
        for path in (directory / "pids").glob("*"):
            pid = int(path.name)
            size = sum(map(pss, family(pid)))
            base.setdefault(pid, size)
            (directory / "measured" / path.name).touch()
            peak[pid] = max(peak.get(pid, 0), size)
        time.sleep(0.1)
    return {"extra_bytes": max((peak[pid] - base[pid] for pid in base), default=0)}


def one_run(way: str, args: Any, *, memory: bool = False, real: bool = False) -> dict[str, Any]:
    steps = args.every * (2 if memory or real else args.snapshots)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        out = directory / "result"
        command = [
            *programs.launcher(args.ranks), programs.program("snapshots.py"),
            "--way", way, "--directory", str(directory / "snapshots"), "--out", str(out),
            "--steps", str(steps), "--every", str(args.every),
            "--step-seconds", str(args.step_seconds), "--copy-nice", str(args.copy_nice),
        ]  # fmt: skip
        if real:
            command += ["--real", "--staging", "auto"]
        (directory / "snapshots").mkdir()
        if memory:
            (directory / "measured").mkdir()
        process = subprocess.Popen(
            command, env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        limit = threading.Timer(programs.LIMIT_SECONDS, process.kill)
        limit.daemon = True  # a Ctrl-C need not wait for it
        limit.start()
        found = watch_memory(process, directory) if memory else {}
        text = process.communicate()[0].decode()
        limit.cancel()
        if process.returncode:
            raise RuntimeError(f"{way}: exit code {process.returncode}\n{text[-3000:]}")
        result = json.loads(out.read_text())
    os.sync()  # the next one gets a quiet disk
    return {**summarise(result, steps, args.every), **found}


def summarise(result: dict[str, Any], steps: int, every: int) -> dict[str, Any]:
    # Means of equally many steps: what else disturbs the machine is in both.
    stall = sum(result["steps"]) - sum(result["quiet"])
    return {
        "stall_share": stall / sum(result["steps"]),
        "stall_per_snapshot": stall / (steps // every),
        "step_seconds": statistics.median(result["quiet"]),
        "committed": len(result["durable"]),
        "skipped": result["skipped"],
        "durable": result["durable"],
        "verified": result.get("verified", []),
        "state_bytes": result["state_bytes"],
    }


def interval(args: Any, megabytes: int, every: str, step: float, seconds: float) -> dict[str, Any]:
    """Train so long by our loop, a snapshot ``every`` so many steps; "0": none."""
    steps = int(seconds / step)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        out = Path(name) / "result"
        programs.complete([
            *programs.launcher(args.ranks), programs.program("intervals.py"), "--out", str(out),
            "--every", every, "--megabytes", str(megabytes), "--steps", str(steps),
            "--step-seconds", str(step),
        ])  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text())
    os.sync()
    half = len(found["ended"]) // 2  # the first half begins, and finds the number
    took = (found["ended"][-1] - found["ended"][half]) / (len(found["ended"]) - 1 - half)
    lost = statistics.fmean(found["lost"][half:])
    return {"megabytes": megabytes, "every": every, "step_seconds": took, "lost_steps": lost}


def intervals(args: Any) -> list[dict[str, Any]]:
    """Measure each state with each number of steps, and without a snapshot."""
    seconds, found = (8.0 if args.quick else 240.0), []
    for megabytes in args.megabytes:
        runs = [
            interval(args, megabytes, every, args.short_step, seconds)
            for every in ("0", "50", "500", "Auto")
        ]
        for run in runs[1:]:
            run["stall_share"] = 1 - runs[0]["step_seconds"] / run["step_seconds"]
            run["lost_seconds"] = run["lost_steps"] * run["step_seconds"]
        found += runs[1:]
    return found


def row(way: str, runs: list[dict[str, Any]], memory: dict[str, Any]) -> list[str]:
    durable = [seconds for run in runs for seconds in run["durable"]]
    verified = [seconds for run in runs for seconds in run["verified"]]
    return [
        way,
        report.spread([100 * run["stall_share"] for run in runs], 2),
        report.spread([run["stall_per_snapshot"] for run in runs], 3),
        f"{sum(r['committed'] for r in runs)}/{sum(r['skipped'] for r in runs)}",
        report.spread(durable, 2),
        report.spread(verified, 2) if verified else "-",
        f"{memory['extra_bytes'] / 1e9:.2f}" if memory else "-",
    ]


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--snapshots", type=int, default=4, help="per run")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.25, help="of the emulated GPU")
    parser.add_argument("--copy-nice", type=int, default=19, help="of our emulated copy engine")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--no-real", dest="real", action="store_false", help="leave out real training on this CPU"
    )
    parser.add_argument("--short-step", type=float, default=0.04, help="of the second table")
    parser.add_argument(
        "--megabytes", type=int, nargs="*", default=[1, 512], help="its states; none: leave it out"
    )
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    args = parser.parse_args()
    facts = report.machine()
    ways = args.ways.split(",") if args.ways else []
    apart = intervals(args)
    if apart:
        names = ("megabytes", "every", "stall_share", "lost_steps", "lost_seconds")
        rows = [
            [f"{run[n]:.3f}" if isinstance(run[n], float) else run[n] for n in names]
            for run in apart
        ]
        print("what a kill at any step loses, by how far apart snapshots are")
        print(report.table("MB | every | stall share | steps lost | s lost", rows))
    repeats = (1 if args.quick else args.repeats) * bool(ways)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for repeat in range(repeats):
        turn = repeat % len(ways)
        for way in ways[turn:] + ways[:turn]:
            runs[way].append(one_run(way, args))
            print(f"{way}: stall {100 * runs[way][-1]['stall_share']:.2f} %", flush=True)
    memory = {way: {} if args.quick else one_run(way, args, memory=True) for way in ways}
    also_real = ways if args.real and not args.quick else []
    real = {way: one_run(way, args, real=True) for way in also_real}
    header = "way | stall % | s per snapshot | committed/skipped | s to durable | s to read back"
    header += " | extra GB"
    state = next(iter(runs.values()))[0]["state_bytes"] if runs else 0
    about = f"a snapshot every {args.every} steps of {args.step_seconds} s (emulated GPU)"
    print(f"\n{args.ranks} ranks, {state / 1e9:.2f} GB of state, {about}")
    print(report.table(header, [row(way, runs[way], memory[way]) for way in ways]))
    if real:
        seconds = statistics.median(run["step_seconds"] for run in real.values())
        print(f"\nreal training on this CPU, {seconds:.2f} s a step")
        print(report.table(header, [row(way, [real[way]], {}) for way in real]))
    result = {
        "goal_stall_share": GOAL,
        "runs": runs,
        "memory": memory,
        "real": real,
        "intervals": apart,
    }
    report.finish("snapshot", facts, result, args.json)


if __name__ == "__main__":
    main()
