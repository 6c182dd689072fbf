"""What /proc, and so ps, pgrep and debuggers, show of a worker that was forked.

A fork shows the command line and the environment of the process that it is a copy of. Both are
texts in its own memory, which it writes anew, as daemons do that set their title.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Where the texts begin and end, in /proc/PID/stat after the name: see proc_pid_stat(5).
_ARGUMENTS, _ENVIRONMENT = 45, 47


def look_started(command: Sequence[str], environment: Mapping[str, str], *first: str) -> None:
    """Show this command and environment, as much as there is room for. Linux only, no threads.

    ``first``: names of variables that are shown whatever room there is.
    """
    for name, value in os.environ.items():
        os.putenv(name, value)  # C's getenv() would read what is written over here
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    names = sorted(environment, key=lambda name: name not in first)
    _write(fields[_ARGUMENTS : _ARGUMENTS + 2], list(command))
    _write(fields[_ENVIRONMENT : _ENVIRONMENT + 2], [f"{n}={environment[n]}" for n in names])


def _write(span: Sequence[str], texts: Sequence[str]) -> None:
    start, end = map(int, span)
    room = end - start - 1  # the last byte stays 0: the kernel looks at it
    if start <= 0 or room <= 0:  # not told
        return
    data = b"".join(os.fsencode(text) + b"\0" for text in texts)[:room]
    ctypes.memmove(start, data.ljust(room, b"\0"), room)
