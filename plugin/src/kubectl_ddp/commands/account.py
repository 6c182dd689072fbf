"""Print where a job's pod-seconds went: `kubectl ddp account`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpjob_contract import LEDGER_STATES
from ddpjob_contract.crd import GPUS, TERMINAL_PHASES
from kubectl_ddp import gang
from kubectl_ddp.gang import Job, moment
from kubectl_ddp.kubectl import Failure, Kubectl
from kubectl_ddp.text import clean, duration, table

_BAR = 30
_PLAIN = re.compile("[0-9]{1,9}")  # as the operator reads a number of GPUs
_LEAST = 0.0005  # of all: less is no line
OF_STATES: Mapping[str, str] = {
    "productive": "steps done for the first time",
    "repeated": "steps done again after a resume",
    "data": "waiting for input",
    "snapshot": "training pauses for a snapshot",
    "warmup": "processes start, up to the end of their first step",
    "recovering": "after a failure, up to the end of the next first step",
    "held": "ready, while another pod is replaced",
    "starting": "image, volumes, containers",
    "waiting": "for a node or a quota",
    "idle": "after the pod's end, or standing by",
    "unknown": "neither launcher nor operator knows",
}


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the table; raise Failure."""
    job = gang.find_job(kubectl, options.job)
    print("\n".join(lines(job, datetime.now(UTC))))
    return 0


@dataclass(frozen=True, slots=True)
class Booked:
    """A ledger: pod-seconds by state, and by cause those of recovering, the most first."""

    since: datetime
    until: datetime
    sums: Mapping[str, float]
    causes: Mapping[str, float]
    total: float

    @property
    def states(self) -> list[tuple[str, float]]:
        """List each state that has a share of the time, and its pod-seconds."""
        pairs = ((state, self.sums.get(state, 0.0)) for state in LEDGER_STATES)
        return [(state, seconds) for state, seconds in pairs if seconds / self.total >= _LEAST]


def booked(job: Job) -> Booked:
    """Return the ledger of a job. Raises Failure where there is none."""
    ledger = job.status.get("ledger") or {}
    since, until = moment(ledger.get("since")), moment(ledger.get("until"))
    if since is None or until is None:
        raise Failure(
            f"{job.name} has no ledger yet: the operator books with each write of the status. If"
            " it stays so, operator or CRD are older than this plugin: upgrade the chart"
        )
    sums, causes = (ledger.get(name) or {} for name in ("podSeconds", "recovering"))
    total = sum(sums.values())
    if not total:
        raise Failure(f"{job.name} is {job.phase} and has had no pods yet: nothing is booked")
    some = ((name, seconds) for name, seconds in causes.items() if seconds)
    ordered = dict(sorted(some, key=lambda cause: -cause[1]))
    return Booked(since, until, sums, ordered, total)


def lines(job: Job, now: datetime) -> list[str]:
    """Lay out the ledger of a job. Raises Failure where there is none."""
    found = booked(job)
    sums, total = found.sums, found.total
    head = [
        f"Job:       {job.namespace}/{job.name}, {job.phase}",
        f"Pods:      {job.replicas}, {hours(total)} of pods in all{_gpus(job, total)}",
        f"Booked:    from {found.since:%Y-%m-%d %H:%M:%S} to {found.until:%Y-%m-%d %H:%M:%S} UTC"
        + _open(job, found.until, now),
    ]
    goodput = job.status.get("goodput")
    if isinstance(goodput, int | float):
        share = "productive share of the time in which it had its pods"
        head.append(f"Goodput:   {goodput:.1%}, the {share}")
    if sums.get("unknown", 0.0) > total / 100:
        why = "no steps were reported; docs/guides/goodput.md#what-is-not-known says how to"
        head.append(f"Unknown:   {sums['unknown'] / total:.1%}: {why}")
    if at := moment((job.status.get("eta") or {}).get("at")):
        head.append(f"Ends:      about {at:%Y-%m-%d %H:%M} UTC, if it fails as it did so far")
    rows = []
    for state, seconds in found.states:
        rows.append(_row(state, seconds, total, OF_STATES[state]))
        if state == "recovering":
            rows += [_row(f"  {name}", each, total, "") for name, each in found.causes.items()]
    return [*head, "", *table(["WHERE", "POD-TIME", "SHARE", "", ""], rows)]


def _row(name: str, seconds: float, total: float, words: str) -> list[str]:
    share = seconds / total
    bar = "#" * round(share * _BAR)
    return [clean(name), hours(seconds), f"{share:.1%}", bar, words]


def hours(seconds: float) -> str:
    """Write pod-time."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else duration(seconds)


def _gpus(job: Job, total: float) -> str:
    """Word the GPU time, where GPUs are asked for."""
    limits = _mapping(_mapping(job.trainer.get("resources")).get("limits"))
    found = (str(limits.get(name, "")) for name in GPUS)
    count = next((int(value) for value in found if _PLAIN.fullmatch(value)), 0)
    return f", {hours(total * count)} of GPUs" if count else ""


def _open(job: Job, until: datetime, now: datetime) -> str:
    left = (now - until).total_seconds()
    open_ = job.phase not in (*TERMINAL_PHASES, "Suspended") and left >= 1
    return f"; the last {duration(left)} follow" if open_ else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
