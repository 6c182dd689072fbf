"""Starts `ddpjob-trainer run` as a program, from the source tree."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.patience import PATIENCE

RUN = (sys.executable, "-m", "ddpjob_trainer", "run")
#: A failure ends the run, as in a pod whose job has restart in place switched off.
NO_ROUNDS = ("--max-rounds-without-progress", "0")
SOURCES = Path(__file__).parents[2] / "trainer/src"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each another one: all are held until all are known."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def launch(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUN, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def launched(
    *arguments: str, env: dict[str, str] | None = None, seconds: float = PATIENCE
) -> Iterator[subprocess.Popen[str]]:
    """A launcher that does not outlive a test that fails; its workers die with it.

    So after ``seconds``, when who reads its output finds the end of it.
    """
    with launch(*arguments, env=env) as process:
        deadline = threading.Timer(seconds, process.kill)
        deadline.start()
        try:
            yield process
        finally:
            deadline.cancel()
            process.kill()


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    with launched(*arguments, env=env) as process:
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err
