"""Find the newest checkpoint of a program that resumes by its arguments (restart.resumeArgs).

The launcher with the hub looks for all of the gang, when nothing runs: hub.py hands the answer on
with Go. `ddpjob-trainer audit` looks by the same rules.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import threading
from pathlib import Path
from typing import Final

#: A file server that does not answer must not stop the launcher.
_POLL_SECONDS: Final = 0.2


class Checkpoints:
    """``pattern``: of files or directories, relative to the working directory; "": of none.

    ``emptied``: a restart removes what lies in the working directory itself.
    """

    def __init__(self, pattern: str, *, emptied: bool = False) -> None:
        self._pattern = pattern
        self._emptied = emptied
        self._found: list[str] | None = None  # of the look that is under way

    def look(self) -> str | None:
        """Return the newest, "" for none, None while a look lasts."""
        if not self._pattern:
            return ""
        if self._found is None:
            self._found = []
            self._thread = threading.Thread(
                target=self._look, args=(self._found,), name="checkpoints", daemon=True
            )
            self._thread.start()
        self._thread.join(_POLL_SECONDS)
        if self._thread.is_alive():
            return None
        found, self._found = self._found, None
        return found[0]

    def _look(self, found: list[str]) -> None:
        found.append(newest(self._pattern, Path.cwd(), emptied=self._emptied))


def newest(pattern: str, folder: Path, *, emptied: bool = False) -> str:
    """Return the newest match by time of modification, then by name; "" for none.

    An empty file or directory is none: a save has only begun.
    """
    found: list[tuple[int, list[tuple[int, str]], str]] = []
    # Path.glob() takes no absolute pattern.
    for name in glob.iglob(pattern, root_dir=folder, recursive=True):  # noqa: PTH207
        path = folder / name
        try:
            about = path.stat()
            folders = stat.S_ISDIR(about.st_mode) and bool(os.listdir(path))  # noqa: PTH208
        except OSError:
            continue
        if not folders and not (stat.S_ISREG(about.st_mode) and about.st_size):
            continue
        if not (emptied and path.resolve().is_relative_to(folder.resolve())):
            found.append((about.st_mtime_ns, _numbered(name), name))
    return max(found, default=(0, [], ""))[2]


def _numbered(name: str) -> list[tuple[int, str]]:
    """Order names by their numbers: step-9 comes before step-10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
