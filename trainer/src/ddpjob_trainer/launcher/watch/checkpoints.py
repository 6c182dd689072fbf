"""Find the newest checkpoint of a program that resumes by its arguments (restart.resumeArgs).

The launcher with the hub looks for all of the gang, when nothing runs: hub.py hands the answer on
with Go. `ddpjob audit` looks by the same rules.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: A file server that does not answer must not stop the launcher.
_POLL_SECONDS: Final = 0.2
#: So often a program may fail from one checkpoint.
_TRIES: Final = 2

_File = tuple[int, int]  # device and inode, the same by whichever name
_Match = tuple[int, list[tuple[int, str]], _File, str]  # modified at, name in parts, file, name
_NONE: Final[_Match] = (0, [], (0, 0), "")


class Checkpoints:
    """``pattern``: of files or directories, relative to the working directory; "": of none.

    ``emptied``: a restart removes what lies in the working directory itself.
    """

    def __init__(self, pattern: str, *, emptied: bool = False) -> None:
        self._pattern = pattern
        self._emptied = emptied
        self._found: list[list[_Match]] | None = None  # of the look that is under way
        self._newest: _Match = _NONE  # at the last look
        self._given = ""  # by it
        self._failures: Counter[str] = Counter()  # of a program that went on from it
        self._earlier: set[tuple[int, _File]] = set()  # what an earlier run has left

    def leave(self) -> str:
        """Take all that is there for an earlier run's; return the newest of it, "" for none."""
        if not self._pattern:
            return ""
        names: list[str] = []
        self._aside(self._leave, names).join(_POLL_SECONDS)
        return next(iter(names), "")

    def look(self, *, failed: bool = False) -> str | None:
        """Return the newest, "" for none, None while a look lasts.

        ``failed``: the program that went on from the last one has ended by its own failure. Where
        it does so twice an older one is next: the newest may be half written.
        """
        if not self._pattern:
            return ""
        if self._found is None:
            self._found = []
            self._thread = self._aside(self._look, self._found)
        self._thread.join(_POLL_SECONDS)
        if self._thread.is_alive():
            return None
        (found,), self._found = self._found, None
        found = [one for one in found if (one[0], one[2]) not in self._earlier]
        newest = next(iter(found), _NONE)
        if newest > self._newest:
            self._failures.clear()  # it got on
        elif failed:
            self._failures[self._given] += 1
        self._newest = newest
        names = [name for *_, name in found]
        sound = [name for name in names if self._failures[name] < _TRIES]
        self._given = next(iter(sound or names), "")
        return self._given

    def _aside(self, search: Callable[[list[Any]], None], found: list[Any]) -> threading.Thread:
        thread = threading.Thread(target=search, args=(found,), name="checkpoints", daemon=True)
        thread.start()
        return thread

    def _look(self, found: list[list[_Match]]) -> None:
        found.append(matches(self._pattern, Path.cwd(), emptied=self._emptied))

    def _leave(self, names: list[str]) -> None:
        found = matches(self._pattern, Path.cwd(), emptied=self._emptied)
        self._earlier = {(at, file) for at, _, file, _ in found}
        names += [name for *_, name in found]


def matches(pattern: str, folder: Path, *, emptied: bool = False) -> list[_Match]:
    """Return what matches, the newest first: by time of modification, then by name.

    An empty file or directory does not: a save has only begun. Of a file with several names, as
    of one that a link called latest leads to, the last name counts.
    """
    found: list[_Match] = []
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
            file = (about.st_dev, about.st_ino)
            found.append((about.st_mtime_ns, _numbered(name), file, name))
    return sorted({one[2]: one for one in sorted(found)}.values(), reverse=True)


def _numbered(name: str) -> list[tuple[int, str]]:
    """Order names by their numbers: step-9 comes before step-10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
