"""Operator processes from a fork server that has imported what they import.

The program is the one that ships; only its start, a second of a core, is paid once. What the test
of a start itself is about is started as users start it (support.operator).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import TimeoutExpired

_PRELOAD = ["pytest", "kopf", "kubernetes.client", "kubernetes.config", "ddpjob_operator.shell.app",
            "ddpjob_operator.settings"]  # fmt: skip


@cache
def _context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    return found


class Forked:
    """As much of subprocess.Popen as the tests use. ``breaks`` is called in the new process."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        breaks: Callable[[], None] | None = None,
    ) -> None:
        args = (list(command), dict(env), str(log), breaks)
        self._process = _context().Process(target=_run, args=args)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("ddpjob_operator", timeout or 0.0)
        return self._process.exitcode


def _run(
    command: list[str], env: dict[str, str], log: str, breaks: Callable[[], None] | None
) -> None:
    """In the new process: what the interpreter would have been started with."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir("/")
    sys.argv = command
    if breaks is not None:
        breaks()
    runpy.run_module("ddpjob_operator", run_name="__main__", alter_sys=True)
