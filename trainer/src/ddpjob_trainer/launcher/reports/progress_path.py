"""Find the progress of a program by the newest mtime at a declared path.

The supervisor looks before rounds and at the end. A thread reads, since a file server that does not
answer must not stop the launcher. Times are compared with earlier ones only, since the file
server's clock is unknown.
"""

from __future__ import annotations

import glob
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
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

    def __init__(self, path: Path | None) -> None:
        self.newest = NEVER
        self._path = path
        self._look: threading.Thread | None = None
        self._due = 0.0  # when to look again without being asked

    def tick(self, now: float) -> None:
        """Look now and then."""
        if now >= self._due:
            self.poll(0)

    def poll(self, seconds: float) -> None:
        """Read the path now; wait for the result, at most about so long."""
        if self._path is None:
            return
        if self._look is not None:
            self._look.join(seconds)
            if self._look.is_alive():
                return  # it may have passed the newest file, but a dead file server has one look
        self._due = math.inf
        self._look = threading.Thread(
            target=self._read, args=(self._path,), name="progress", daemon=True
        )
        self._look.start()
        self._look.join(seconds)

    def _read(self, path: Path) -> None:
        since = time.monotonic()
        self.newest = max(self.newest, newest_mtime(path))
        now = time.monotonic()
        self._due = now + max(_EVERY_SECONDS, (now - since) / _SHARE)


def newest_mtime(path: Path) -> int:
    """Return the newest mtime, in ns, of a file or below a directory.

    ``*`` in the last part matches any characters. Below the path, links count themselves and are
    not followed. A missing or unreadable entry counts as NEVER.
    """
    budget = iter(range(MOST_ENTRIES))
    newest, directories = NEVER, []
    name = glob.escape(path.name).replace("[*]", "*")
    matches = glob.iglob(f"{glob.escape(str(path.parent))}/{name}")  # noqa: PTH207  lazy
    for found in islice(matches, MOST_ENTRIES):
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
