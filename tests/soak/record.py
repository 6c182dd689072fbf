"""What the soak has seen, as JSON and as a page: faults, recoveries, runs, whatever was wrong."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HEAD = """# Soak

`make soak-cluster` runs three DDPJobs of different kinds on a devcluster, each again and again,
while faults in an order drawn from a seed, each kind once before any comes twice, hit processes,
pods, nodes, the control plane, the operators and the disk. Every run must end in the weights of an
undisturbed one, no job may stand still, and every write that the API server's watch tells of is
held against the invariants of `tests/support/invariants.py`. The script has written this page and
docs/internals/soak.json.

"""
FAULTS_HEAD = (
    "| Fault | times | held for | all train on: median | max | status tells: median | max |",
    "|---|---|---|---|---|---|---|",
)
TIMES = """Seconds from the beginning of the fault: where nothing can go on before it is over, the
time that it was held for is part of them. *Train on*: each gang that it concerns has made a step
more than ever before, those that it repeats included; the launchers are asked every 0.2 s. Faults
on top of which a second one came are counted, but their times are not. A process that is stopped
while it starts is found out after hang.startupSeconds, and a gang that has just begun starts first.

## Runs
"""
RUNS_HEAD = (
    "| Kind | runs | equal weights | restarts with new pods | in place | seconds: median |",
    "|---|---|---|---|---|---|",
)


@dataclass
class Hit:
    """One fault. Seconds from its beginning; None: nobody it concerned was training."""

    kind: str
    at: float  # seconds since the soak began
    target: str
    held: float = 0.0
    trains: float | None = None  # until all whom it concerns had trained a step more
    told: float | None = None  # until their status said so
    second: str = ""  # the kind of a fault that came on top of it
    missed: str = ""  # why it could not be done


@dataclass
class Record:
    """Everything that is kept."""

    seed: int
    minutes: float
    commit: str
    on: str
    hits: list[Hit] = field(default_factory=list)
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    writes: int = 0  # that were held against the invariants
    gaps: int = 0  # times that the watch had to begin anew

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def page(found: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """docs/internals/soak.md. ``kinds``: what each kind of fault is."""
    runs, hits = found["runs"], [one for one in found["hits"] if not one["missed"]]
    verdict = [run["weights"].partition(":")[0] for run in runs]
    counts = {word: verdict.count(word) for word in ("equal", "differ", "unread")}
    restarts = sum(run["restarts"].get("total", 0) for run in runs)
    rounds = sum(run["restarts"].get("inPlace", 0) for run in runs)
    told = (
        f"{found['on']}, commit {found['commit']}, seed {found['seed']},"
        f" {found['minutes']:g} minutes, nodes and pods on 2 cores that had other work, too:\n"
        f"**{len(hits)} faults, {len(runs)} runs: {counts['equal']} with equal weights,"
        f" {counts['differ']} with others, {counts['unread']} whose weights could not be read;"
        f" {restarts} restarts with new pods, {rounds} in place;"
        f" {found['writes']} writes checked, {len(found['wrong'])} things wrong.**"
    )
    rows = [_row(what, hits, kind) for kind, what in kinds.items()]
    lines = [HEAD + told, "", *FAULTS_HEAD, *rows, "", TIMES, *RUNS_HEAD, *_kinds(runs)]
    if found["wrong"]:
        lines += ["", "## What was wrong", "", *(f"- {one}" for one in found["wrong"])]
    return "\n".join(lines) + "\n"


def _row(what: str, hits: Sequence[Mapping[str, Any]], kind: str) -> str:
    mine = [one for one in hits if one["kind"] == kind]
    held = _seconds([one["held"] for one in mine], ("median",))
    clean = [one for one in mine if not one["second"]]
    trains = _seconds([one["trains"] for one in clean], ("median", "max"))
    told = _seconds([one["told"] for one in clean], ("median", "max"))
    return f"| {what} | {len(mine)} | {held} | {trains} | {told} |"


def _seconds(values: Sequence[float | None], which: Sequence[str]) -> str:
    known = [one for one in values if one is not None]
    found = {"median": statistics.median(known), "max": max(known)} if known else {}
    return " | ".join(f"{found[one]:.1f}" if found else "" for one in which)


def _kinds(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for kind in sorted({run["name"].split("-")[1] for run in runs}):
        mine = [run for run in runs if run["name"].split("-")[1] == kind]
        equal = len([run for run in mine if run["weights"] == "equal"])
        total, rounds = (
            sum(run["restarts"].get(part, 0) for run in mine) for part in ("total", "inPlace")
        )
        seconds = statistics.median(run["seconds"] for run in mine)
        lines.append(f"| {kind} | {len(mine)} | {equal} | {total} | {rounds} | {seconds:.0f} |")
    return lines
