"""Copy evidence of failures to the object store, and back for people. No torch.

process.py copies after each snapshot, and at a launcher's end; cli.py fetches. Everything is tried
once: what the store does not take now it may get with the next snapshot.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpjob_contract.evidence import EVIDENCE_DIR
from ddpjob_trainer.evidence import folder
from ddpjob_trainer.evidence.bounds import MOST_FILE
from ddpjob_trainer.evidence.folder import MAX_ROUNDS, Place
from ddpjob_trainer.snapshot.remote.store import file_system

_OURS = re.compile(r"replica-[0-9]{1,6}\.json|rank-[0-9]{1,7}\.nccl\.gz")
_MOST_FETCHED = 20_000  # files


class EvidenceCopy:
    """Copies from a snapshot directory to a URL. ``names``: only these files, None: all."""

    def __init__(self, url: str, root: Path, names: frozenset[str] | None = None) -> None:
        self._root = root
        self._names = names
        self._fs, base = file_system(url)
        self._base = posixpath.join(base, EVIDENCE_DIR)
        self._copied: dict[str, tuple[int, int]] = {}  # size and mtime of what is there

    def copy(self) -> None:
        """Copy what is new; raises OSError, and what the protocol's library raises."""
        found = [seen.place for seen in folder.find(self._root)[:MAX_ROUNDS]]
        for at in found:
            self._copy(at)
        if found:
            self._prune(max(found, key=lambda at: (at.attempt, at.round)))

    def _copy(self, at: Place) -> None:
        there = _sizes(self._fs, posixpath.join(self._base, at.name))
        with folder.opened(self._root, at.name) as fd:
            for name in os.listdir(fd):  # noqa: PTH208 - relative to a descriptor
                if not _OURS.fullmatch(name) or (self._names and name not in self._names):
                    continue
                path = posixpath.join(self._base, at.name, name)
                seen = os.stat(name, dir_fd=fd, follow_symlinks=False)
                known = self._copied.get(path, (there.get(name), seen.st_mtime_ns))
                if known != (seen.st_size, seen.st_mtime_ns):
                    with contextlib.suppress(ValueError):  # a stranger's
                        data = folder.read(fd, name, MOST_FILE)
                        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                        self._fs.pipe_file(path, data)
                self._copied[path] = (seen.st_size, seen.st_mtime_ns)

    def _prune(self, own: Place) -> None:
        """Remove the oldest rounds of this job, never one after its newest here."""
        mine = sorted(
            (at.attempt, at.round, at.name)
            for at in map(folder.parsed, _names(self._fs, self._base))
            if at is not None and at.job == own.job
        )
        for attempt, round_, name in mine[:-MAX_ROUNDS]:
            if (attempt, round_) < (own.attempt, own.round):
                self._fs.rm(posixpath.join(self._base, name), recursive=True)


@contextlib.contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Bring the evidence at a URL to a directory that goes at the end."""
    fs, base = file_system(url)
    base = posixpath.join(base, EVIDENCE_DIR)
    with tempfile.TemporaryDirectory(prefix="ddpjob-evidence-") as made:
        left = _MOST_FETCHED
        for at in filter(None, map(folder.parsed, _names(fs, base))):
            for name, size in _sizes(fs, posixpath.join(base, at.name)).items():
                if left and _OURS.fullmatch(name) and size <= MOST_FILE:
                    left -= 1
                    data = fs.cat_file(posixpath.join(base, at.name, name))
                    with folder.opened(Path(made), at.name, make=True) as fd:
                        folder.write(fd, name, data)
        yield Path(made)


def _names(fs: Any, path: str) -> list[str]:
    fs.invalidate_cache()  # other processes write there
    with contextlib.suppress(FileNotFoundError):
        return [posixpath.basename(str(one).rstrip("/")) for one in fs.ls(path, detail=False)]
    return []


def _sizes(fs: Any, path: str) -> dict[str, int]:
    fs.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
        found = fs.ls(path, detail=True)
        return {posixpath.basename(str(one["name"])): int(one.get("size") or 0) for one in found}
    return {}
