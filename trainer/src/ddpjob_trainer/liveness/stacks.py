"""Dump the stacks of a worker's threads on request, even while it holds the GIL.

In the worker faulthandler writes them to a file at a signal; its C handler needs no interpreter.
The launcher sends the signal and reads the file. Never imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from pathlib import Path
from typing import IO, Final

from ddpjob_trainer.liveness.heartbeat import path_of

#: The last real-time signal: the others are the user's (USR1, USR2), glibc's (32, 33) or taken from
#: the low end by libraries that need one.
REQUEST: Final = signal.SIGRTMAX

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>[0-9?]+) in (?P<name>.*)$')
_MAX_THREADS = 8

_file: IO[bytes] | None = None  # must stay open: faulthandler keeps only its number


def arrive(directory: Path, rank: int) -> None:
    """Answer requests from here on, with a note of this process. Its children inherit both."""
    with contextlib.suppress(OSError):  # a child that imports the library, or no room
        fd = os.open(path_of(directory, rank, "pid"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        enable(directory, rank)
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)


def arrived(directory: Path, rank: int) -> int:
    """Return the process that has called arrive() for a rank, 0: none has."""
    try:
        return int(path_of(directory, rank, "pid").read_text() or 0)
    except (OSError, ValueError):
        return 0


def enable(directory: Path | None, rank: int) -> None:
    """Answer requests in a worker; also print the stacks at a crash (SIGSEGV, ...)."""
    global _file
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # stderr may be no file
        if not faulthandler.is_enabled():
            faulthandler.enable()
    if directory is not None:
        path = path_of(directory, rank, "stacks")
        path.unlink(missing_ok=True)
        _file = path.open("ab", buffering=0)
        faulthandler.register(REQUEST, file=_file, all_threads=True, chain=False)


def request(directory: Path, rank: int, pid: int) -> bool:
    """Ask a worker that has called enable() for its stacks; False if it cannot answer."""
    try:
        os.truncate(path_of(directory, rank, "stacks"), 0)
        os.kill(pid, REQUEST)
    except OSError:
        return False
    return True


def read(directory: Path, rank: int, limit: int) -> str:
    """Return at most ``limit`` bytes of the answer, "" without one."""
    try:
        with path_of(directory, rank, "stacks").open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""


def brief(answer: str) -> list[str]:
    """Return up to 8 lines, a thread each: innermost call first, main thread last."""
    threads: list[list[str]] = []
    for line in answer.splitlines():
        frame = _FRAME.match(line)
        if line.endswith("(most recent call first):"):
            threads.append([])
        elif frame is not None and threads:
            file = Path(frame["file"]).name
            threads[-1].append(f"{frame['name']} ({file}:{frame['line']})")
    return [f"stack: {' < '.join(thread)}" for thread in threads if thread][-_MAX_THREADS:]
