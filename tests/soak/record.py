"""What the soak has seen, as JSON and as a page: faults, runs, whatever was wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD = """# Soak

`make soak-cluster` runs three DDPJobs of different kinds on a devcluster, each again and again,
while faults in an order drawn from a seed, each kind once before any comes twice, hit processes,
pods, nodes, the control plane, the operators and the disk. Every run must end in the weights of an
undisturbed one, no job may stand still, and every write that the API server's watch tells of is
held against the invariants of `tests/support/invariants.py`. The script has written this page and
tests/soak/soak.json.

"""
FAULTS_HEAD = ("| Fault | times |", "|---|---|")
RUNS_HEAD = (
    "| Kind | runs | equal weights | restarts with new pods | in place | seconds: median |",
    "|---|---|---|---|---|---|",
)


@dataclass
class Hit:
    """One fault."""

    kind: str
    at: float  # seconds since the soak began
    target: str
    held: float = 0.0  # seconds
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


def page(found: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """tests/soak/soak.md. ``kinds``: what each kind of fault is."""
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
    hit = Counter(one["kind"] for one in hits)
    rows = [f"| {what} | {hit[kind]} |" for kind, what in kinds.items()]
    lines = [HEAD + told, "", *FAULTS_HEAD, *rows, "", *RUNS_HEAD, *_kinds(runs)]
    if found["wrong"]:
        lines += ["", "## What was wrong", "", *(f"- {one}" for one in found["wrong"])]
    return "\n".join(lines) + "\n"


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
