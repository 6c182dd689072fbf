"""Copy the working directory for a run, so that none sees what another one wrote. runs.py calls it.

Small files are copied, large ones, hidden folders and virtual environments are linked: a script
reads those. The user's directory stays as it is.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from ddpjob_trainer.errors import ConfigError

#: Larger files are linked.
LARGE: Final = 16 << 20
#: More is no folder of a script: data, other projects.
MOST_BYTES: Final = 2 << 30
MOST_FILES: Final = 20_000
_CACHES: Final = ("__pycache__", ".ipynb_checkpoints")


def fill(
    work: Path, source: Path, leave_out: Collection[str] = (), linked: Collection[str] = ()
) -> None:
    """Make ``work`` a fresh copy of ``source``. Raises ConfigError where that is too large."""
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    count = size = 0
    for path, inner in _entries(source, source, leave_out, linked, work):
        target = work / inner
        target.parent.mkdir(parents=True, exist_ok=True)
        count += 1
        if path.is_dir() and not path.is_symlink():
            if _as_link(path, inner, linked):
                target.symlink_to(path)
            else:
                target.mkdir(exist_ok=True)
            continue
        if path.is_symlink() or not path.is_file():
            if path.exists():  # a socket or a dangling link is nothing to read
                target.symlink_to(path.resolve())
            continue
        bytes_ = path.stat().st_size
        if bytes_ > LARGE or _matches(inner, linked):
            target.symlink_to(path)
            continue
        size += bytes_
        if count > MOST_FILES or size > MOST_BYTES:
            raise ConfigError(
                f"{source} holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB to copy for"
                " each run: start in the folder of the script, name what is only read with"
                " --link NAME, and what no run needs with --leave-out NAME"
            )
        shutil.copy2(path, target)


def _entries(
    folder: Path, source: Path, leave_out: Collection[str], linked: Collection[str], work: Path
) -> Iterator[tuple[Path, Path]]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        path = Path(entry.path)
        inner = path.relative_to(source)
        if entry.name in _CACHES or _matches(inner, leave_out) or work.is_relative_to(path):
            continue
        yield path, inner
        if entry.is_dir(follow_symlinks=False) and not _as_link(path, inner, linked):
            yield from _entries(path, source, leave_out, linked, work)


def _as_link(folder: Path, inner: Path, linked: Collection[str]) -> bool:
    hidden = folder.name.startswith(".")
    return hidden or (folder / "pyvenv.cfg").exists() or _matches(inner, linked)


def _matches(inner: Path, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatch(str(inner), pattern.rstrip("/")) for pattern in patterns)
