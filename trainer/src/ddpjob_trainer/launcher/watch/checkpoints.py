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
from collections import Counter
from pathlib import Path
from typing import Final

#: A file server that does not answer must not stop the launcher.
_POLL_SECONDS: Final = 0.2
#: So often a program may fail from one checkpoint.
_TRIES: Final = 2

_Match = tuple[int, list[tuple[int, str]], str]  # time of modification, name in parts, name


class Checkpoints:
    """``pattern``: of files or directories, relative to the working directory; "": of none.

    ``emptied``: a restart removes what lies in the working directory itself.
    """

    def __init__(self, pattern: str, *, emptied: bool = False) -> None:
        self._pattern = pattern
        self._emptied = emptied
        self._found: list[list[_Match]] | None = None  # of the look that is under way
        self._newest: _Match = (0, [], "")  # at the last look
        self._given = ""  # by it
        self._failures: Counter[str] = Counter()  # of a program that went on from it
        self._earlier: set[tuple[int, str]] = set()  # of an earlier run: by time and name

    def leave(self) -> str:
        """Take all that is there for an earlier run's; return the newest of it, "" for none."""
        found: list[str] = []
        thread = threading.Thread(
            target=self._leave, args=(found,), name="checkpoints", daemon=True
        )
        thread.start()
        thread.join(_POLL_SECONDS)
        return next(iter(found), "")

    def _leave(self, newest: list[str]) -> None:
        found = matches(self._pattern, Path.cwd(), emptied=self._emptied) if self._pattern else []
        self._earlier = {(at, name) for at, _, name in found}
        newest += [name for *_, name in found[:1]]

    def look(self, *, failed: bool = False) -> str | None:
        """Return the newest, "" for none, None while a look lasts.

        ``failed``: the program that went on from the last one has ended by its own failure. Where
        it does so twice an older one is next: the newest may be half written.
        """
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
        (found,), self._found = self._found, None
        found = [one for one in found if (one[0], one[-1]) not in self._earlier]
        newest = next(iter(found), (0, [], ""))
        if newest > self._newest:
            self._failures.clear()  # it got on
        elif failed:
            self._failures[self._given] += 1
        self._newest = newest
        names = [name for *_, name in found]
        sound = [name for name in names if self._failures[name] < _TRIES]
        self._given = next(iter(sound or names), "")
        return self._given

    def _look(self, found: list[list[_Match]]) -> None:
        found.append(matches(self._pattern, Path.cwd(), emptied=self._emptied))


def matches(pattern: str, folder: Path, *, emptied: bool = False) -> list[_Match]:
    """Return what matches, the newest first: by time of modification, then by name.

    An empty file or directory does not: a save has only begun.
    """
    found: list[_Match] = []
    there: set[tuple[int, int]] = set()  # a link to the newest is no second one
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
        if (about.st_dev, about.st_ino) in there:
            continue
        there.add((about.st_dev, about.st_ino))
        if not (emptied and path.resolve().is_relative_to(folder.resolve())):
            found.append((about.st_mtime_ns, _numbered(name), name))
    return sorted(found, reverse=True)


def _numbered(name: str) -> list[tuple[int, str]]:
    """Order names by their numbers: step-9 comes before step-10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
