"""Show where processes are in C, CUDA or NCCL: py-spy or pystack, where one is installed.

hangs.py starts a look when a worker hangs, and takes the text before it kills the worker. The
program runs in a thread, for some seconds at most.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Final

#: Each stops the process, reads its stacks and lets it go on.
_PROGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "py-spy": ("dump", "--native", "--pid"),
    "pystack": ("remote", "--native"),
}
SECONDS: Final = 5.0  # for all processes
_MOST: Final = 32 * 1024  # characters of each


class Look:
    """One look at some processes. ``pids``: rank -> pid, in the order of interest."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        names = (name for name in _PROGRAMS if shutil.which(name))
        self._name = next(names, "")
        self._pids = pids
        self._texts: list[str] = []
        self._until = time.monotonic() + SECONDS
        self._thread = threading.Thread(target=self._run, name="native stacks", daemon=True)
        if self._name:
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether more text may come in time."""
        return self._thread.is_alive() and time.monotonic() < self._until

    def text(self) -> str:
        """Return what has come."""
        return "".join(list(self._texts))

    def _run(self) -> None:
        for rank, pid in self._pids.items():
            left = self._until - time.monotonic()
            if left > 0:
                words = [self._name, *_PROGRAMS[self._name], str(pid)]
                said = _said(words, left)[:_MOST].rstrip()
                self._texts.append(f"--- rank {rank}, by {self._name}\n{said}\n")


def _said(words: list[str], seconds: float) -> str:
    """Run a program; return its output, or why there is none."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return f"it does not start: {error.strerror}"
    return done.stdout.decode(errors="replace")
