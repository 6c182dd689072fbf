"""Notice which files a script has written between two steps; recorder.py asks before each step.

So the driver knows after which steps there is a checkpoint, whatever writes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: Of more files than these at the start only those are looked at that come later.
_MANY: Final = 2000
_Stat = tuple[int, int, int]


class Watched:
    """The files below a folder. Links are not followed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[Path, int] = {}  # when something in it was made or removed last
        self._files: dict[Path, _Stat] = {}
        self._ignored: frozenset[Path] = frozenset()
        self._scan(root)
        if len(self._files) > _MANY:
            self._ignored, self._files = frozenset(self._files), {}

    def changed(self) -> dict[str, int]:
        """Return the sizes of files that were written since the last call, by path."""
        before = dict(self._files)
        for folder, seen in list(self._folders.items()):
            if (stat := _stat(folder)) is None:
                del self._folders[folder]
            elif stat[0] != seen:
                self._scan(folder)
        for path in before:
            self._note(path)
        return {
            str(path.relative_to(self._root)): stat[2]
            for path, stat in self._files.items()
            if before.get(path) != stat
        }

    def _scan(self, folder: Path) -> None:
        if (stat := _stat(folder)) is None:
            return
        self._folders[folder] = stat[0]
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return  # it is gone already
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if path not in self._folders:
                    self._scan(path)
            elif path not in self._files and path not in self._ignored:
                self._note(path)

    def _note(self, path: Path) -> None:
        stat = _stat(path)
        if stat is None:
            self._files.pop(path, None)
        else:
            self._files[path] = stat


def _stat(path: Path) -> _Stat | None:
    try:
        it = path.lstat()
    except OSError:
        return None
    return it.st_mtime_ns, it.st_ino, it.st_size
