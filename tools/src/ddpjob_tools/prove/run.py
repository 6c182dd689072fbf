"""Run the launcher under chaos, attempt after attempt, as the operator would.

disturbance.py calls it. Between two attempts it kills all that the old one left behind, as a
kubelet does when it removes a pod. The gang dies with the driver.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_trainer.environment import TRACE, outside_of_jobs
from ddpjob_trainer.launcher.processes import children

#: Where launchers mark the processes that they have started.
TRACE_FILE = "trace"


class Job:
    """One launcher at a time."""

    def __init__(
        self,
        program: Sequence[str],
        nproc: int,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Take ``program``, which follows the options of `ddpjob-trainer run`."""
        self._program = tuple(program)
        self._nproc = nproc
        self._environment = dict(environment)
        self._log = log
        self.attempt = 0
        self.pid = 0
        self.exit_code: int | None = None

    def launch(self) -> None:
        """Start the next attempt."""
        self.attempt += 1
        self.exit_code = None
        command = (
            *(sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", str(self._nproc)),
            *self._program,
        )
        environment = {**self._environment, contract.ATTEMPT: str(self.attempt)}
        children.adopt_orphans()
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.pid = children.spawn(command, environment, fd, fd)
        finally:
            os.close(fd)

    def running(self) -> bool:
        """Return whether the launcher runs; once it has ended, end its descendants."""
        for pid, status in children.reap():
            self._reaped(pid, status)
        if self.exit_code is not None:
            self.end()
        return self.exit_code is None

    def end(self) -> None:
        """Kill and reap the launcher and its descendants."""
        children.end_all(self._reaped, math.inf, ())

    def _reaped(self, pid: int, status: int) -> None:
        if pid == self.pid:
            self.exit_code = status if status >= 0 else 128 - status

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the gang's output."""
        if not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def environment_of_job(
    base: Mapping[str, str], directory: Path, uid: str, every: int, hang_seconds: float | None
) -> dict[str, str]:
    """Return the operator's variables over a shell's, without another job's."""
    kept = outside_of_jobs(base)
    kept |= {
        contract.UID: uid,
        contract.SNAPSHOT_DIR: str(directory / "snapshots"),
        TRACE: str(directory / TRACE_FILE),
        contract.SNAPSHOT_EVERY_STEPS: str(every),
        contract.DRILL: "Never",  # each restart is one of ours, which are counted
    }
    if hang_seconds is not None:
        kept |= {
            contract.HANG_STEP_SECONDS: f"{hang_seconds:g}",
            contract.HANG_SNAPSHOT_SECONDS: f"{hang_seconds:g}",
        }
    return kept
