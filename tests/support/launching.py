"""Starts `ddpjob-trainer run` as a program, from the source tree."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from support.patience import WHOLE

RUN = (sys.executable, "-m", "ddpjob_trainer", "run")
#: A failure ends the run, as in a pod whose job has restart in place switched off.
NO_ROUNDS = ("--max-rounds-without-progress", "0")
#: A script's last line that waits for signals. One that comes just before a long sleep begins is
#: handled in Python only when the sleep has ended, so none may be long (seen once: 10 minutes).
HANDLES = "while True: time.sleep(0.02)\n"
ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "trainer/src"
#: PYTHONPATH of processes that import the trainer.
PATHS = os.pathsep.join(
    str(ROOT / one) for one in ("contract/src", "trainer/src", "tools/src", "plugin/src")
)


#: Below those that the kernel gives to whoever asks for any, above those that launchers find for
#: scripts: none of them is lost between this function's end and the use of the port.
PORTS = range(20_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each another one: all are held until all are known."""
    found: list[int] = []
    with contextlib.ExitStack() as probes:
        while len(found) < count:
            probe = probes.enter_context(socket.socket())
            port = random.SystemRandom().choice(PORTS)  # beside other tests, whatever seed is set
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    return found


def page(port: int, name: str) -> str:
    """A page of a launcher: state, metrics or healthz."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=WHOLE) as reply:
        return str(reply.read().decode())


def has_address(address: str) -> bool:
    """Whether this machine has it: not each has IPv6."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def launch(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUN, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PATHS, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def launched(
    *arguments: str, env: dict[str, str] | None = None, seconds: float = WHOLE
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
        out, err = process.communicate(timeout=WHOLE)
        return process.returncode, out, err


def finished(*words: object, **env: str) -> tuple[int, str]:
    """Exit code of a Python program that needs no other end, and its two outputs in one."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": PATHS, **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WHOLE, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout
