"""Start a program with its output in a log, watch it, end it with all that it has started.

The verbs start everything here, from their main thread. What they have started dies with them.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import ddpjob_contract as contract
from ddpjob_trainer.environment import CHAOS, RESCUE, TRACE, outside_of_jobs
from ddpjob_trainer.launcher.processes import children

LOOK_SECONDS: Final = 0.05
#: Where launchers mark the processes that they have started.
TRACE_FILE: Final = "trace"
_HANG = (contract.HANG_STEP_SECONDS, contract.HANG_SNAPSHOT_SECONDS)
_LOG_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16


class ProofError(Exception):
    """A run did not get where it must; the message says what happened, and what to do."""


class Run:
    """One program. Started again it is the next attempt; what the last one left is ended first.

    So a kubelet does with a pod. ``exit_code``: None while it runs, 128 + N after signal N.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: str = "."
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._folder = folder
        self.log = log
        self.attempt = 0
        self.pid = 0
        self.exit_code: int | None = None

    def start(self) -> None:
        """Start the next attempt."""
        if self.attempt:
            self.end()
        self.attempt += 1
        self.exit_code = None
        environment = {**self._environment, contract.ATTEMPT: str(self.attempt)}
        children.adopt_orphans()
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.pid = children.spawn(self._command, environment, fd, fd, cwd=self._folder)
        finally:
            os.close(fd)

    def running(self) -> bool:
        """Return whether the program runs. A log that grows too large begins again."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._reaped(pid, os.waitstatus_to_exitcode(status))
        if self.log.stat().st_size > _LOG_BYTES:
            os.truncate(self.log, 0)
        return self.exit_code is None

    def _reaped(self, pid: int, status: int) -> None:
        if pid == self.pid:
            self.exit_code = status if status >= 0 else 128 - status

    def end(self) -> None:
        """Kill and reap the program and all other descendants of this process."""
        children.end_all(self._reaped, math.inf, ())

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of its output."""
        text = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        return "\n".join(f"  | {line[:300]}" for line in text.splitlines()[-lines:])


def in_turn(runs: Sequence[Run], most: int, seconds: float) -> Iterator[Run]:
    """Run these, ``most`` at a time; yield each when it has ended. Kill what takes too long."""
    begun: dict[Run, float] = {}
    try:
        for wanted in runs:
            while wanted not in begun or wanted.running():
                active = [one for one in begun if one.running()]
                for run in active:
                    if time.monotonic() - begun[run] > seconds:
                        children.send(run.pid, signal.SIGKILL)
                for run in [one for one in runs if one not in begun][: most - len(active)]:
                    run.start()
                    begun[run] = time.monotonic()
                time.sleep(LOOK_SECONDS)
            yield wanted
    finally:  # interrupted
        for run in begun:
            if run.running():
                run.end()


def launcher(nproc: int, *words: str) -> list[str]:
    """Return the command that starts ``words`` in so many processes."""
    return [sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", str(nproc), *words]


def environment(
    base: Mapping[str, str], snapshots: Path, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a shell's variables without another job's, and ``more``. Each restart is ours."""
    ours = {contract.SNAPSHOT_DIR: str(snapshots), contract.DRILL: "Never"}
    return {**outside_of_jobs(base, keep=(RESCUE,)), **ours, **(more or {})}


def environment_of_job(
    base: Mapping[str, str], directory: Path, uid: str, every: int, hang_seconds: float | None
) -> dict[str, str]:
    """Return what the operator would set, with all of a job's files below ``directory``."""
    more = {
        contract.UID: uid,
        contract.SNAPSHOT_EVERY_STEPS: str(every),
        TRACE: str(directory / TRACE_FILE),
        CHAOS: str(directory),
    }
    if hang_seconds is not None:
        more |= dict.fromkeys(_HANG, f"{hang_seconds:g}")
    return environment(base, directory / "snapshots", more)
