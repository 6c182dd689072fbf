"""Copy the working directory for each run; audit.py calls it. None sees what another wrote.

The user's directory stays as it is: all files are copied, but for repositories and virtual
environments, which scripts only read, and what the user names: those are linked.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddpjob_trainer.errors import ConfigError

#: More is no folder of a script: data, other projects.
MOST_BYTES: Final = 2 << 30
MOST_FILES: Final = 20_000
_CACHES: Final = ("__pycache__", ".ipynb_checkpoints")
_REPOSITORIES: Final = (".git", ".hg", ".svn")


@dataclass(frozen=True, slots=True)
class Source:
    """The folder to copy; ``linked`` and ``left_out``: patterns of paths within it.

    ``linked`` may also lie outside, as ../data: it is linked beside the copy, at the same place.
    """

    folder: Path
    left_out: Collection[str] = ()
    linked: Collection[str] = ()

    def place(self, root: Path) -> Path:
        """Return the copy's place below ``root``, deep enough for what is linked outside of it."""
        up = max((path.parts.count("..") for path in self._outside().values()), default=0)
        return root.joinpath(*self.folder.parts[max(1, len(self.folder.parts) - up) :])

    def check(self) -> None:
        """Refuse a pattern that has no effect. Raises ConfigError."""
        whole = list(Source(self.folder, (), self.linked)._entries(self.folder, self.folder))
        given = [*(("--link", one) for one in self.linked if one not in self._outside())]
        given += [("--leave-out", one) for one in self.left_out]
        for option, one in given:
            if not any(self._matches(path, [one]) for path in whole):
                raise ConfigError(
                    f"{option} {one}: {self.folder} holds no such file or folder: give its path"
                    " from there"
                )

    def _outside(self) -> dict[str, Path]:
        """Return what is linked from outside of the folder: pattern -> place beside it."""
        found = {one: Path(os.path.relpath(self.folder / one, self.folder)) for one in self.linked}
        return {
            one: path
            for one, path in found.items()
            if path.parts[:1] == ("..",) and path.name != ".." and (self.folder / path).exists()
        }

    def fill(self, root: Path) -> None:
        """Make place() a fresh copy. Raises ConfigError where the folder is too large."""
        if root.exists():
            shutil.rmtree(root)
        work = self.place(root)
        work.mkdir(parents=True)
        for path in set(self._outside().values()):
            link = Path(os.path.normpath(work / path))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((self.folder / path).resolve())
        files, sizes = 0, Counter[str]()
        for path in self._entries(self.folder, root):
            inner = path.relative_to(self.folder)
            target = work / inner
            if path.is_symlink() or self._as_link(path):
                if path.exists():
                    target.symlink_to(path.resolve())
            elif path.is_dir():
                target.mkdir()
            elif path.is_file():  # and no socket
                files, size = files + 1, path.stat().st_size
                sizes[inner.parts[0]] += size
                if files > MOST_FILES or sizes.total() > MOST_BYTES:
                    raise ConfigError(self._too_large(sizes))
                shutil.copy2(path, target)

    def _entries(self, folder: Path, work: Path) -> Iterator[Path]:
        for entry in sorted(os.scandir(folder), key=lambda one: one.name):
            path = Path(entry.path)
            if entry.name in _CACHES or self._matches(path, self.left_out):
                continue
            if work.is_relative_to(path):  # --keep DIR in the folder itself
                continue
            yield path
            if entry.is_dir(follow_symlinks=False) and not self._as_link(path):
                yield from self._entries(path, work)

    def _as_link(self, path: Path) -> bool:
        read_only = path.name in _REPOSITORIES or (path / "pyvenv.cfg").exists()
        return read_only or self._matches(path, self.linked)

    def _matches(self, path: Path, patterns: Collection[str]) -> bool:
        inner = str(path.relative_to(self.folder))
        return any(fnmatch.fnmatch(inner, pattern.rstrip("/")) for pattern in patterns)

    def _too_large(self, sizes: Counter[str]) -> str:
        largest = ", ".join(f"{name} ({size >> 20} MiB)" for name, size in sizes.most_common(3))
        return (
            f"{self.folder} holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB, of which"
            f" each run would get a copy: {largest}. Name what is only read, such as data, with"
            " --link NAME, and what no run needs with --leave-out NAME"
        )
