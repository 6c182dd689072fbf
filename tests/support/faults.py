"""The fault matrix: what can go wrong, what must follow, and which tests show it.

A test says `@pytest.mark.fault("O1")`; docs/internals/fault-matrix.md is written from these marks
and FAULTS: `make manifests`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support import tiers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/fault-matrix.md"

#: Section -> row -> (fault, what must follow).
FAULTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "The operator": {
        "O1": (
            "killed before a write, after it is stored, after the reply: each write of a restart",
            "the same end; no object created or deleted more often, but for that one write",
        ),
        "O2": (
            "its first list, or its cache, shows an older state",
            "nothing that cannot be taken back happens before a quorum read",
        ),
        "O3": (
            "events lost, twice or late; the watch ends with 410, 429, 500, 504",
            "a list finds what was missed; the process lives",
        ),
        "O4": ("two operators act at once", "no second gang, no failure counted twice"),
        "O5": ("the leader is stopped, cut off or told to end", "the other one takes over"),
        "O6": ("away while a gang runs, fails or ends", "caught up with from what is stored"),
    },
    "The API server": {
        "A1": ("409 at a status write", "the job is read again, and decided anew"),
        "A2": ("a name is taken by somebody else's object", "a reason; the object is not touched"),
        "A3": ("no quota for all pods", "what was created is released; tried again, uncharged"),
        "A4": (
            "403, 429, 500, 504, a cut connection, a reply lost, at each write",
            "tried again later; no object twice, no restart more",
        ),
        "A5": (
            "it will not have the pod: a field or a value that is wrong",
            "a reason in the API's own words, before anything ran",
        ),
        "A6": ("away for minutes while a gang trains", "it trains on; no failure is counted"),
        "A7": ("etcd is restored from a snapshot", "the store begins anew; no attempt twice"),
        "A8": ("it, or the CRD, is not there yet", "the operator says so and waits"),
        "A9": (
            "each right of the operator is lost, its token ends; both are given back",
            "it waits, and goes on; no failure is counted",
        ),
    },
    "Pods and nodes": {
        "N1": (
            "a process dies (SIGKILL, any exit code), its pod lives",
            "restarted in place in all pods; else one restart of the gang",
        ),
        "N2": ("several members die at once", "one restart, one failure"),
        "N3": ("a pod is deleted, by force or not", "one restart, free of charge"),
        "N4": ("evicted, drained, preempted", "one restart, free of charge, after a snapshot"),
        "N5": (
            "out of memory: a process, a child of one, the whole container",
            "class OOM, with limit, peak and cure; one that was survived explains no end",
        ),
        "N6": ("the node dies", "Fence: elsewhere after afterSeconds; Wait: says what helps"),
        "N7": ("a node that was cut off comes back", "its zombie commits nothing"),
        "N8": ("the image, a claim or a volume is missing", "a reason; released at the deadline"),
        "N9": ("no room for all pods", "all or none; two gangs do not block each other"),
        "N10": ("pods that end slowly at SIGTERM", "the next attempt waits until they are gone"),
        "N11": ("labels of a pod taken off or forged", "no loop, no second gang"),
        "N12": ("the node reboots", "told as such, free of charge; the gang goes on"),
        "N13": (
            "a GPU fails (the program's last words say so)",
            "the attempt ends, free of charge; the next one is kept off that node",
        ),
        "N14": (
            "peers of a dead machine end as if the program had failed, before Kubernetes knows",
            "the job does not fail for it; a plain program is charged once",
        ),
        "N16": (
            "an init container fails",
            "charged as the program's own failure; told with its words",
        ),
        "N17": (
            "a pod outgrows a storage limit of its own and is evicted",
            "charged as the program's own failure, told with the kubelet's sentence",
        ),
        "N18": (
            "the kubelet ends the program for its own liveness or startup probe",
            "charged as the program's own failure, told with the probe's words",
        ),
        "N19": (
            "the runtime cannot start a container",
            "final only where no other node would change it; else another node, free at first",
        ),
    },
    "Users, neighbours and clocks": {
        "U1": (
            "the template or the spec of a job changes under it",
            "what runs goes on, losses and successes count; no new pod, and the reason is told",
        ),
        "U2": (
            "a deadline, a suspension or an end of the start as the last replica succeeds",
            "a gang that has succeeded has succeeded",
        ),
        "U3": ("somebody writes into the status", "no loop; the job gets to its end"),
        "U4": (
            "a clock is set, or is not that of the others",
            "no deadline passes early, one of a clock days ahead waits; nobody is charged",
        ),
        "U5": (
            "the cluster is late: quota, a webhook, rights, nodes",
            "waited for ever more seldom, charged to nobody",
        ),
        "U6": ("a pod is deleted before all run", "one restart, counted as a disruption"),
        "U7": ("a pod's object stays after its end", "waited for, and what to look at is told"),
        "U8": (
            "objects as large or as deep as the API server takes",
            "they are refused with the cure; the operator stays within its memory",
        ),
        "U15": (
            "a program fails again and again, at one place or elsewhere",
            "told while it lasts; the same failure three times at one step ends the job",
        ),
        "U17": (
            "a job of the same name finds the snapshots of one that was deleted",
            "goes on from them, and says so: whose they are, what differs, 0 steps trained",
        ),
        "U16": (
            "a start fails for some minutes: an image, a name, a volume",
            "tried over ten minutes, ever more seldom",
        ),
        "U9": (
            "somebody's finalizer keeps a job that is deleted",
            "its gang ends once it is broken or late; no pod is made",
        ),
        "U12": (
            "a script reads and writes relative to its working directory",
            "as on the laptop; told is what ends with the pod",
        ),
    },
    "The training": {
        "T1": ("SIGKILL of any rank at any moment", "every bit and every loss as undisturbed"),
        "T2": ("a second kill while the first is being recovered from", "the same"),
        "T3": ("a rank hangs (SIGSTOP, an endless loop, a dead collective)", "ended by the watch"),
        "T4": ("SIGTERM to one rank or to all", "one snapshot of one step, then the end"),
        "T5": ("a launcher is lost", "the attempt ends, the next one goes on"),
        "T6": ("a straggler of an earlier attempt or round", "shut out"),
        "T7": ("one bit of one rank's state flips", "seen before the next snapshot; all stop"),
        "T8": ("a loss or gradient that is not finite", "stop, skip or ignore, on all ranks"),
        "T9": ("another number of ranks afterwards", "level elastic: the same bits"),
        "T10": ("a log that nobody reads, a worker in D state", "no launcher waits for it"),
        "T11": (
            "the job's Service is gone as processes are restarted in place",
            "told by the launchers, in the log and as the cause; the next attempt makes it again",
        ),
        "T12": ("a usual slip in a script", "refused once, with the cure; no further round"),
        "T13": (
            "a rank or replica ends with 0 while others train",
            "named before the failure of those that lost it; told where nobody fails",
        ),
        "T14": (
            "a script keeps what no snapshot holds: a flag, a counter, a DataLoader of its own",
            "a restart does the steps after the snapshot again; the first that differs is named",
        ),
    },
    "Snapshots": {
        "S1": ("a writer is killed at each operation of a save", "the one before is loaded"),
        "S2": ("no space left, I/O errors", "that snapshot fails, training goes on"),
        "S3": ("a damaged, foreign or forged file", "put aside; the next older is taken by all"),
        "S4": ("one rank cannot read what others can", "taken by none"),
        "S5": ("a stopped gang wakes up after its successor", "its snapshots are on no chain"),
        "S6": ("the disk is lost, an object store has a copy", "it goes on from the store"),
    },
}  # fmt: skip

#: Rows that no test of the gate shows -> the reason.
BEYOND_THE_GATE: Mapping[str, str] = {
    "N12": "a reboot takes two starts of a gang; unit tables show what the operator makes of it",
}


def names() -> set[str]:
    """Every row's."""
    return {name for rows in FAULTS.values() for name in rows}


def page() -> str:
    """Return docs/internals/fault-matrix.md as FAULTS and the marks of now make it."""
    lines = [
        "# Fault matrix",
        "",
        "What can go wrong, what must follow, and the tests that show it, from their marks by",
        "`make manifests`. The level is the folder of the test: `api` has a real API server,",
        "`trainer` real processes, `cluster` all. `make check` runs the tests of the tier check,",
        "`make test` (the gate) those of gate too, `make test-all` all of them; when that was last",
        "done, and with what end, is in [test-durations.md](test-durations.md).",
    ]
    marks = dict(marked())
    for section, rows in FAULTS.items():
        lines += ["", f"## {section}", "", "| | fault | what follows | shown by |"]
        lines += ["|---|---|---|---|"]
        for name, (fault, expected) in rows.items():
            tests = [_shown(f, mark.tier) for f, mark in marks.items() if name in mark.rows]
            lines.append(f"| {name} | {fault} | {expected} | {'<br>'.join(tests)} |")
    lines += ["", "## Rows that the gate leaves to `make test-all`", ""]
    lines += [f"- {name}: {reason}" for name, reason in BEYOND_THE_GATE.items()] or ["None."]
    return "\n".join(lines) + "\n"


def _shown(function: str, tier: str) -> str:
    path, _, test = function.partition("::")
    return f"{Path(path).parts[1]} ({tier}): `{Path(path).name}::{test}`"


@dataclass(frozen=True, slots=True)
class Marked:
    """The rows that a test function shows, and its tier."""

    rows: list[str]
    tier: str


def marked() -> Iterator[tuple[str, Marked]]:
    """Test functions of rows, as the sources say."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name, module = str(file.relative_to(ROOT)), ast.parse(file.read_text())
        tier = tiers.of_sources(name, module)
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and (rows := _rows(node)):
                yield f"{name}::{node.name}", Marked(rows, tier[node.name])


def _rows(function: ast.FunctionDef) -> list[str]:
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    faults = [call for call in calls if getattr(call.func, "attr", "") == "fault"]
    return [argument.value for call in faults for argument in call.args
            if isinstance(argument, ast.Constant)]  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page())
