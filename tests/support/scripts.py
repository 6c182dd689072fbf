"""Starts the scripts of examples/ as users do, and reads what they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ddpjob_trainer import trace
from ddpjob_trainer.environment import TRACE
from support.launching import NO_ROUNDS, PATHS, RUN
from support.patience import WHOLE

EXAMPLES = Path(__file__).parents[2] / "examples"
AT_EXIT = Path(__file__).with_name("at_exit")
LAUNCHER = (*RUN, "--nproc", "3")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3")


def start(*command: str, **env: str) -> subprocess.Popen[str]:
    sources = os.pathsep.join([str(AT_EXIT), PATHS, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": sources, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*command: str, code: int = 0, **env: str) -> str:
    """Its output; fails unless it ends with this exit code, and all threads before it."""
    with start(*command, **env) as process:
        try:
            out, _ = process.communicate(timeout=WHOLE)
        finally:
            process.kill()
    assert process.returncode == code, out[-30_000:]
    assert code or "has left a thread" not in out, out[-30_000:]
    return out


def show(
    file: str,
    *arguments: str,
    nproc: int,
    code: int = 0,
    launcher: tuple[str, ...] = (*RUN, *NO_ROUNDS, "--nproc"),
    env: dict[str, str] | None = None,
) -> str:
    """All that ``examples/file`` printed, without the launcher's `[rank N] `.

    ``code``: how the launcher must end. ``nproc`` 0: without a launcher.
    """
    begin = (*launcher, str(nproc)) if nproc else (sys.executable,)
    one_thread = {"OMP_NUM_THREADS": "1", **(env or {})}
    out = finish(*begin, str(EXAMPLES / file), *arguments, code=code, **one_thread)
    return re.sub(r"^\[rank \d+\] ", "", out, flags=re.MULTILINE)


def kill_rank_1_after(snapshot: int, *command: str, **env: str) -> tuple[int, str]:
    """SIGKILL it when the launcher's log tells of the snapshot: exit code, the log from then on.

    Or of a later one, if that one was told of too late. Until then nobody trains on.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace")
        held = {"TEST_HELD_FROM_SNAPSHOT": str(snapshot), TRACE: str(path)}
        return _killed(start(*command, **held, **env), path, snapshot)


def _killed(started: subprocess.Popen[str], path: Path, snapshot: int) -> tuple[int, str]:
    with started as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                told = re.search(r"step \d+/\d+ .* snapshot (\d+)$", line)
                if told and int(told[1]) >= snapshot:
                    os.kill(trace.workers(path)[1], signal.SIGKILL)
                    break
            rest, _ = process.communicate(timeout=WHOLE)
        finally:
            process.kill()
    return process.returncode, rest


def value(name: str, output: str) -> str:
    """Of the one line `name=value`."""
    found = re.findall(rf"^(?:\[rank 0\] )?{name}=(\S+)$", output, re.MULTILINE)
    assert len(found) == 1, output[-2000:]
    return str(found[0])


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers on the one line that begins like ``pattern``, after it."""
    found = re.findall(rf"^{pattern}(.*)$", output, re.MULTILINE)
    assert len(found) == 1, output[-3000:]
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", found[0])]
