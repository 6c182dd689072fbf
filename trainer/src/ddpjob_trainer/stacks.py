"""Stacks of all threads of a worker, on request from outside, even while it holds the GIL.

The worker has faulthandler write them to a file when a signal comes; its C handler needs no
interpreter. The launcher sends the signal and reads the file. Never imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import IO, Final

#: The last real-time signal: the others are the user's (USR1, USR2), glibc's (32, 33) or taken
#: from the low end by libraries that need one.
REQUEST: Final = signal.SIGRTMAX

_file: IO[bytes] | None = None  # faulthandler keeps the number only: it must stay open


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.stacks"


def enable(directory: Path | None, rank: int) -> None:
    """In a worker: answer requests, and have a crash (SIGSEGV, ...) print its stacks as well."""
    global _file
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # stderr may be no file
        if not faulthandler.is_enabled():
            faulthandler.enable()
    if directory is not None:
        path = _path(directory, rank)
        path.unlink(missing_ok=True)
        _file = path.open("ab", buffering=0)
        faulthandler.register(REQUEST, file=_file, all_threads=True, chain=False)


def request(directory: Path, rank: int, pid: int) -> bool:
    """Ask a worker that has called enable() for its stacks; False when it cannot answer."""
    try:
        os.truncate(_path(directory, rank), 0)
        os.kill(pid, REQUEST)
    except OSError:
        return False
    return True


def size(directory: Path, rank: int) -> int:
    """How many bytes of the answer are there."""
    try:
        return _path(directory, rank).stat().st_size
    except OSError:
        return 0


def read(directory: Path, rank: int, limit: int) -> str:
    """Return at most ``limit`` bytes of the answer, "" when there is none."""
    try:
        with _path(directory, rank).open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""
