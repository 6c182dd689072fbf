"""Starts what the checks measure, each under a launcher of its own, and reads what it wrote."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_trainer.environment import TRACE, outside_of_jobs
from ddpjob_trainer.launcher.processes import children

#: What takes longer hangs; the launcher's own deadlines end it long before.
_LIMIT_SECONDS = 900.0
_LAST = 3  # lines of output that a failed launch is told by


@dataclass(frozen=True)
class Setup:
    """``facts``: what environment() found. ``directory``: for all that the checks write."""

    nproc: int
    cuda: bool
    directory: Path
    facts: Mapping[str, Any]
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _launched: dict[str, Launch] = field(default_factory=dict)

    def once(self, name: str, start: Callable[[], Launch]) -> Launch:
        """Return the launch of this name, started by the first check that asks for it."""
        if name not in self._launched:
            self._launched[name] = start()
        return self._launched[name]

    def place(self) -> Path:
        """Make a new directory."""
        path = self.directory / str(next(self._numbers))
        path.mkdir()
        return path


@dataclass(frozen=True)
class Launch:
    """One that has ended. ``results``: what its processes wrote, by rank. ``place``: its files."""

    code: int
    output: str
    results: list[dict[str, Any]]
    report: dict[str, Any]
    place: Path

    def why(self) -> str:
        """Explain an unwanted end in a few words."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"exit code {self.code}: " + " | ".join(line[:200] for line in lines[-_LAST:])


def run(
    setup: Setup,
    program: str,
    *arguments: str,
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Run a module of this package in ``nproc`` processes. Raises subprocess.TimeoutExpired."""
    place = setup.place()
    report = place / "report.json"
    command = [
        *(sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", str(setup.nproc)),
        *("--termination-log", str(report), "--events", str(place / "events.jsonl"), *options),
        *("-m", f"{__package__}.{program}", *arguments, "--out", str(place)),
    ]
    more = {
        contract.SNAPSHOT_DIR: str(place / "snapshots"), TRACE: str(place / "trace"),
        contract.DRILL: "Never",
        **_device(setup), **(env or {}),
    }  # fmt: skip
    code, output = _complete(command, more)
    files = sorted(place.glob("rank-*.json"), key=lambda path: int(path.stem[5:]))
    results = [json.loads(path.read_text()) for path in files]
    told = json.loads(report.read_text()) if report.exists() else {}
    return Launch(code, output, results, told, place)


def chaos(setup: Setup, *arguments: str, kills: int) -> Launch:
    """Kill a training of the workload at random, and compare it with an undisturbed one."""
    place = setup.place()
    command = [
        *(sys.executable, "-m", "ddpjob_trainer", "chaos", "--nproc", str(setup.nproc)),
        *("--kills", str(kills), "--every", "3", "--signals", "KILL"),
        *("-m", f"{__package__}.workload", *arguments, "--out", str(place)),
    ]
    code, output = _complete(command, _device(setup))
    return Launch(code, output, [], {}, place)


def alone(module: str, *arguments: str) -> tuple[int, str]:
    """Run a module of this package in one process without a launcher: exit code and output."""
    return _complete([sys.executable, "-m", f"{__package__}.{module}", *arguments], {})


def _device(setup: Setup) -> dict[str, str]:
    return {} if setup.cuda else {"CUDA_VISIBLE_DEVICES": ""}


def _complete(command: list[str], more: Mapping[str, str]) -> tuple[int, str]:
    # In a pod of a DDPJob, too, these gangs are this machine's alone.
    env = outside_of_jobs(os.environ)
    process = subprocess.Popen(
        command, env={**env, **more}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=children.die_with(os.getpid()),  # noqa: PLW1509
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
    finally:
        process.kill()  # a launcher takes its workers along
    return process.returncode, output
