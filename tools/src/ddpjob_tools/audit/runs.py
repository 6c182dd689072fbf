"""Start a script with the probe in each of its processes, watch it, end it. experiment.py calls it.

One process is started as `python script.py` would be, several by our launcher, as torchrun does.
All descendants are ended with a run, and die with this command.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_trainer.environment import outside_of_jobs
from ddpjob_trainer.launcher.processes import children

_LOOK_SECONDS = 0.05
#: A rank that does not reach the step of the kill soon after another waits for that one.
_TOGETHER_SECONDS = 10.0
_LOG_BYTES = 64 << 20
_PROBE = "ddpjob_tools.prove.probe"


class AuditError(Exception):
    """The script cannot be judged; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the user starts, and where. ``nproc`` None: as plain `python`, no launcher."""

    program: str
    arguments: tuple[str, ...]
    module: bool
    nproc: int | None
    here: Path
    environment: Mapping[str, str]
    patience: float = 300.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended: ``code`` None when it was cut off; ``silent``: as nothing happened."""

    code: int | None
    log: Path
    silent: bool = False

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of its output."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 65536))
            text = log.read().decode(errors="replace")
        return "\n".join(f"  | {line[:300]}" for line in text.splitlines()[-lines:])


@dataclass(slots=True)
class Progress:
    """How many steps each rank has written, read as the files grow."""

    folder: Path
    counts: dict[int, int] = field(default_factory=dict)
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def look(self) -> int:
        """Return the steps of the rank that has made fewest, 0 before any."""
        for path in self.folder.glob("rank-*.jsonl"):
            rank = int(path.name.removeprefix("rank-").partition(".")[0])
            at, count = self._read.get(path, (0, -1))  # the first line is no step
            with path.open("rb") as file:
                file.seek(at)
                new = file.read()
            count += new.count(b"\n")
            self._read[path] = (at + len(new), count)
            self.counts[rank] = max(self.counts.get(rank, 0), count)
        return min(self.counts.values(), default=0)


def run(
    script: Script,
    work: Path,
    out: Path,
    *,
    more: Sequence[str] = (),
    stop_at: int | None = None,
    enough: Callable[[int], bool] = lambda steps: False,
    show: Callable[[int], None] = lambda steps: None,
) -> End:
    """Run the script in ``work`` until it ends, stops at a step, or has made ``enough`` steps.

    Or until nothing has happened for too long. Leaves no process behind.
    """
    out.mkdir(parents=True)
    log = out.with_suffix(".log")
    children.adopt_orphans()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    ended: dict[int, int] = {}
    progress = Progress(out)
    code: int | None = None
    silent = False
    try:
        command = _command(script, work, out, more, stop_at)
        pid = children.spawn(command, _environment(script, work), fd, fd, cwd=str(work))
        since, seen, first = time.monotonic(), -1, 0.0
        while True:
            ended.update(children.reap())
            steps = progress.look()
            show(steps)
            if pid in ended:
                code = ended[pid]
                break
            now = time.monotonic()
            if sum(progress.counts.values()) != seen:
                seen, since = sum(progress.counts.values()), now
            elif now - since > script.patience:
                silent = True
                break
            if enough(steps):
                break
            there = [count for count in progress.counts.values() if stop_at and count >= stop_at]
            first = first or (now if there else 0.0)
            if there and (len(there) >= (script.nproc or len(progress.counts))
                          or now - first > _TOGETHER_SECONDS):  # fmt: skip
                break
            if log.stat().st_size > _LOG_BYTES:
                os.truncate(log, 0)
            time.sleep(_LOOK_SECONDS)
    finally:
        os.close(fd)
        children.end_all(ended.__setitem__, math.inf, ())
    return End(code if code is None or code >= 0 else 128 - code, log, silent)


def _command(
    script: Script, work: Path, out: Path, more: Sequence[str], stop_at: int | None
) -> list[str]:
    program = script.program
    if not script.module:
        path = (script.here / program).resolve()
        program = str(work / path.relative_to(script.here) if path.is_relative_to(script.here)
                      else path)  # fmt: skip
    order = {"out": str(out), "watch": str(work), "stop_at": stop_at, "module": script.module,
             "shown": script.program, "seed": script.seed}  # fmt: skip
    words = ["-m", _PROBE, json.dumps(order), program, *script.arguments, *more]
    if script.nproc is None:
        return [sys.executable, *words]
    launcher = ("-m", "ddpjob_trainer", "run", "--nproc", str(script.nproc), "--spares", "0")
    return [sys.executable, *launcher, "--max-rounds-without-progress", "0", *words]


def _environment(script: Script, work: Path) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        **outside_of_jobs(script.environment),
        contract.SNAPSHOT_DIR: str(work / ".ddpjob-snapshots"),  # of scripts with our library
        contract.DRILL: "Never",
    }
