"""Find the progress of a program by the newest mtime at a declared path.

The supervisor looks before rounds and at the end. A thread reads, since a file server that does not
answer must not stop the launcher. Times are compared with earlier ones only, since the file
server's clock is unknown.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

_LEVELS: Final = 3
#: The most entries of one look, the newest directories first; a file server has other clients.
MOST_ENTRIES: Final = 10_000
_EVERY_SECONDS: Final = 5.0
#: The largest share of time spent on looks.
_SHARE: Final = 0.02
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
NEVER: Final = -1


class ProgressPath:
    """``newest``: the latest mtime read, in ns since the epoch; NEVER: none yet.

    It only grows. ``path`` None: nothing is declared, and no thread runs.
    """

    def __init__(self, path: Path | None, every: float = _EVERY_SECONDS) -> None:
        self.newest = NEVER
        self._path = path
        self._every = every
        self._wanted = threading.Event()
        self._read = threading.Condition()
        self._begun = 0
        self._done = 0
        if path is not None:
            threading.Thread(target=self._run, name="progress", daemon=True).start()

    def poll(self, seconds: float) -> None:
        """Read the path now; wait for the result, at most so long."""
        if self._path is None:
            return
        with self._read:
            wanted = self._begun + 1  # a look that has begun may have passed the newest file
            self._wanted.set()
            self._read.wait_for(lambda: self._done >= wanted, seconds)

    def _run(self) -> None:
        assert self._path is not None
        while True:
            with self._read:
                self._wanted.clear()
                self._begun += 1
            since = time.monotonic()
            self.newest = max(self.newest, newest_mtime(self._path))
            with self._read:
                self._done = self._begun
                self._read.notify_all()
            self._wanted.wait(max(self._every, (time.monotonic() - since) / _SHARE))


def newest_mtime(path: Path) -> int:
    """Return the newest mtime, in ns, of a file or below a directory.

    ``*`` in the last part matches any characters. Below the path, links count themselves and are
    not followed. A missing or unreadable entry counts as NEVER.
    """
    budget = iter(range(MOST_ENTRIES))
    newest, directories = NEVER, []
    for found in _declared(path, budget):
        try:
            about = Path(found).stat()
        except OSError:
            continue
        if stat.S_ISDIR(about.st_mode):
            directories.append((about.st_mtime_ns, found))
        elif stat.S_ISREG(about.st_mode):
            newest = max(newest, _sane(about.st_mtime_ns))
    for _ in range(_LEVELS):
        below: list[tuple[int, str]] = []
        for _, directory in sorted(directories, reverse=True):
            for entry, about in _entries(directory, budget):
                if stat.S_ISDIR(about.st_mode):
                    below.append((about.st_mtime_ns, entry.path))
                elif stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                    newest = max(newest, _sane(about.st_mtime_ns))
        directories = below
    return newest


def as_text(mtime: int) -> str:
    """Format a time in RFC 3339, UTC, with microseconds."""
    moment = _EPOCH + timedelta(microseconds=mtime // 1000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _sane(mtime: int) -> int:
    """Drop a time that the operator cannot write down."""
    return mtime if mtime < 2**63 else NEVER


def _declared(path: Path, budget: Iterator[int]) -> list[str]:
    if "*" not in path.name:
        return [str(path)]
    matches: Callable[[str], object] = re.compile(
        ".*".join(map(re.escape, path.name.split("*"))), re.DOTALL
    ).fullmatch
    return [entry.path for entry, _ in _entries(str(path.parent), budget) if matches(entry.name)]


def _entries(
    directory: str, budget: Iterator[int]
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the readable entries of a directory, with their lstat."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if next(budget, None) is None:
                    return
                try:
                    yield entry, entry.stat(follow_symlinks=False)
                except OSError:
                    continue
    except OSError:
        return
