"""Start each program that the checks measure, once, under its launcher; read its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_trainer.environment import TRACE, outside_of_jobs
from ddpjob_trainer.launcher.processes import children

#: What takes longer hangs; the launcher's own deadlines end it long before.
_LIMIT_SECONDS = 900.0
_TRIALS = "ddpjob_tools.prove.trials"
_LAST = 3  # lines of output that describe a failed launch


class LaunchError(Exception):
    """A launch ended as it must not; the message says how."""


@dataclass(frozen=True)
class Launch:
    """One that has ended. ``results``: what its processes wrote, by rank. ``place``: its files."""

    code: int
    output: str
    results: list[dict[str, Any]]
    report: dict[str, Any]
    place: Path

    def needed(self) -> list[dict[str, Any]]:
        """Return the results. Raises LaunchError unless it succeeded."""
        if self.code != 0:
            raise LaunchError(self.why())
        return self.results

    def why(self) -> str:
        """Explain an unwanted end in a few words."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"exit code {self.code}: " + " | ".join(line[:200] for line in lines[-_LAST:])


@dataclass(frozen=True)
class Setup:
    """``facts``: what environment() found. ``directory``: for all that the checks write."""

    nproc: int
    cuda: bool
    directory: Path
    facts: Mapping[str, Any]
    #: By name: starting processes takes nearly all of the time, so checks share launches.
    launched: dict[str, Launch] = field(default_factory=dict)


def run(
    setup: Setup, name: str, program: str, *arguments: str, env: Mapping[str, str] | None = None
) -> Launch:
    """Run a module of this package in ``nproc`` processes, once under this name.

    Raises subprocess.TimeoutExpired.
    """
    place = setup.directory / name
    more = {
        contract.SNAPSHOT_DIR: str(place / "snapshots"), TRACE: str(place / "trace"),
        contract.DRILL: "Never",
    }  # fmt: skip
    files = ("--termination-log", str(place / "report.json"), "--events", str(place / "events"))
    words = ("-m", f"{_TRIALS}.{program}", *arguments, "--out", str(place))
    return _once(setup, name, ("run", *files, *words), more | dict(env or {}))


def chaos(setup: Setup, name: str, *arguments: str, kills: int) -> Launch:
    """Have chaos kill the workload, once under this name; the one result is chaos' own."""
    place = setup.directory / name
    words = (
        *("--kills", str(kills), "--every", "3", "--signals", "KILL", "--points", "none"),
        *("--json", str(place / "rank-0.json"), "-m", f"{_TRIALS}.workload", *arguments),
        *("--out", str(place)),
    )
    # Only what is compiled here: another run's choice of kernels would be in the user's own.
    return _once(setup, name, ("chaos", *words), {"TORCHINDUCTOR_CACHE_DIR": str(place / "torch")})


def _once(setup: Setup, name: str, words: Sequence[str], more: Mapping[str, str]) -> Launch:
    if name not in setup.launched:
        place = setup.directory / name
        place.mkdir()
        start = (sys.executable, "-m", "ddpjob_trainer", words[0], "--nproc", str(setup.nproc))
        hidden = {} if setup.cuda else {"CUDA_VISIBLE_DEVICES": ""}
        code, output = complete((*start, *words[1:]), {**hidden, **more})
        files = sorted(place.glob("rank-*.json"), key=lambda path: int(path.stem[5:]))
        results = [json.loads(path.read_text()) for path in files]
        report = place / "report.json"
        told = json.loads(report.read_text()) if report.exists() else {}
        setup.launched[name] = Launch(code, output, results, told, place)
    return setup.launched[name]


def alone(module: str, *arguments: str) -> tuple[int, str]:
    """Run a module of this package without a launcher: exit code and output."""
    return complete((sys.executable, "-m", f"{_TRIALS}.{module}", *arguments), {})


def complete(command: Sequence[str], more: Mapping[str, str]) -> tuple[int, str]:
    """Run a command outside of any job; it dies with this process."""
    process = subprocess.Popen(
        command, env={**outside_of_jobs(os.environ), **more}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=children.die_with(os.getpid()),  # noqa: PLW1509
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
    finally:
        process.kill()  # a launcher takes its workers along
    return process.returncode, output
