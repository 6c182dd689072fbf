"""Remove files that a newer durable snapshot has made needless. Runs in rank 0's writer thread."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError

_STEP = re.compile(r"step-([0-9]{1,15})\b.*", re.DOTALL)
_OURS = re.compile(r"start\.json|step-[0-9]")


def retain(root: Path, sequence: int, keep: int) -> None:
    """Keep the newest ``keep`` snapshots of an incarnation and what its chain needs.

    What cannot be removed now is left for the next time.
    """
    with contextlib.suppress(OSError):
        directory = lineage.directory(root, sequence)
        unread: list[Path] = []
        ours = _readable(manifest.listed(directory), unread)
        for path in [*ours][:-keep]:
            _remove(path)
            del ours[path]
        if ours and not unread:
            _remove_leftovers(directory, [*ours][-1], set().union(*ours.values()))
        _retain_chain(lineage.Disk(root), sequence, keep)


def _readable(paths: Iterable[Path], unread: list[Path]) -> dict[Path, set[str]]:
    """Return the data files of those manifests that say what they consist of.

    What only has the name of a manifest must not take the place of a snapshot. ``unread`` gets
    those that the disk does not give: perhaps later.
    """
    found = {}
    for path in paths:
        try:
            found[path] = set(_data_files(path, os.lstat(path).st_mtime_ns))
        except InvalidSnapshotError:
            continue
        except OSError:
            unread.append(path)
    return found


@lru_cache(16)
def _data_files(path: Path, written: int) -> frozenset[str]:
    """Read a manifest once. To parse a large one keeps the interpreter from the training thread."""
    return frozenset(file.name for file in manifest.read(path).files)


def _remove_ours(directory: Path) -> None:
    """Remove a directory of ours, with a record or our files only. One named by a date stays."""
    with contextlib.suppress(OSError):
        names = disk.names(directory)
        if lineage.START in names or all(map(_OURS.match, names)):
            disk.remove_tree(directory)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        disk.remove(path)


def _remove_leftovers(directory: Path, newest: Path, kept: set[str]) -> None:
    """Remove files of removed, failed and abandoned snapshots. One still being written stays."""
    step = manifest.step_of(newest.name)
    for name in disk.names(directory):
        number = _STEP.fullmatch(name)
        if number is None or name in kept or manifest.step_of(name) is not None:
            continue
        if step is None or int(number[1]) <= step:
            _remove(directory / name)


def _retain_chain(folders: lineage.Disk, sequence: int, keep: int) -> None:
    """Remove earlier directories that our chain needs no more, and surplus copies in it."""
    taken = folders.numbers()
    starts = {} if taken[:1] in ([], [sequence]) else lineage.read_starts(folders)
    mine = starts.get(sequence)
    if mine is None or lineage.newest(starts) != mine:
        return  # we may be the zombie
    copies: Counter[int] = Counter()

    def steps_of(number: int, limit: int | None) -> set[int]:
        found = _readable(manifest.listed(lineage.directory(folders.root, number)), [])
        steps = {p: s for p in found if (s := manifest.step_of(p.name)) is not None}
        counting = {p: s for p, s in steps.items() if limit is None or s <= limit}
        for path, step in counting.items():
            copies[step] += 1
            if copies[step] > keep and number != sequence:
                _remove_copy(path, found)
        return set(counting.values())

    for number in lineage.unneeded(starts, taken, sequence, keep, steps_of):
        _remove_ours(lineage.directory(folders.root, number))


def _remove_copy(path: Path, found: dict[Path, set[str]]) -> None:
    """Remove what a restart without progress has copied where there are no hard links.

    ``found``: all of its directory.
    """
    _remove(path)
    for name in found.pop(path).difference(*found.values()):
        _remove(path.parent / name)
