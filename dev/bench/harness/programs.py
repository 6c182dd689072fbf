"""Starts the programs that are compared, each by its own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.report import ROOT

PROGRAMS = ROOT / "dev/bench/programs"
SOURCES = (ROOT / "contract/src", ROOT / "trainer/src", ROOT / "tools/src")
#: The repository's one GPT; its modules are imported by name, here and in what is started.
GPT = ROOT / "examples/ladder/5_gpt"
sys.path.append(str(GPT))


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Both sides get one thread per process and the loopback interface."""
    paths = [*map(str, SOURCES), str(PROGRAMS), str(GPT)]
    return {
        **{n: v for n, v in os.environ.items() if not n.startswith(("DDPJOB_", "PET_"))},
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DDPJOB_DRILL": "Never",
        **(extra or {}),
    }


def torchrun(nproc: int, *options: str) -> list[str]:
    where = ("--standalone", "--nproc-per-node", str(nproc))
    return [sys.executable, "-m", "torch.distributed.run", *where, *options]


def launcher(nproc: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", str(nproc), *options]


#: A measured run that takes longer hangs.
LIMIT_SECONDS = 1200


def complete(command: list[str], extra: Mapping[str, str] | None = None) -> None:
    """Run to the end. Raises RuntimeError with the last output, TimeoutExpired for a hang."""
    done = subprocess.run(
        command,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}"
        )


def program(name: str) -> str:
    path: Path = PROGRAMS / name
    return str(path)
