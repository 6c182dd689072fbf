"""Endless loops beside a test: what depends on which thread or process comes first shows there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOPS = 2
#: Dies with the process that started it, also when that is killed before it asked for this.
_LOOP = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
while os.getppid() == {parent}:
    pass
"""


@contextmanager
def busy_machine() -> Iterator[None]:
    """Within, as many endless loops run as two cores can take."""
    command = [sys.executable, "-c", _LOOP.format(parent=os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()
