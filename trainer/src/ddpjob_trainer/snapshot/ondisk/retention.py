"""Which files may go, now that a newer snapshot is durable. Runs in rank 0's keeper."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError


def retain(root: Path, sequence: int, keep: int) -> None:
    """Keep the newest ``keep`` snapshots of an incarnation and what its chain needs.

    What cannot be removed now is left for the next time.
    """
    with contextlib.suppress(OSError, InvalidSnapshotError):
        directory = lineage.directory(root, sequence)
        ours = manifest.listed(directory)
        for path in ours[:-keep]:
            disk.remove(path)
        if ours:
            kept = {f.name for path in ours[-keep:] for f in manifest.read(path).files}
            _remove_leftovers(directory, ours[-1], kept)
        for unneeded in _unneeded(root, sequence, keep):
            disk.remove_tree(lineage.directory(root, unneeded))


def _remove_leftovers(directory: Path, newest: Path, kept: set[str]) -> None:
    """Files of removed, failed and abandoned snapshots, but not of one still being written."""
    step = manifest.step_of(newest)
    for path in directory.glob("step-*"):
        if manifest.step_of(path) is not None or path.name in kept:
            continue
        number = path.name.split("-")[1].partition(".")[0]
        if not number.isdigit() or step is None or int(number) <= step:
            disk.remove(path)


def _unneeded(root: Path, sequence: int, keep: int) -> list[int]:
    """Directories older than those that hold the newest ``keep`` steps of our chain."""
    taken = lineage.sequences(root)
    if taken[0] == sequence:
        return []
    starts = lineage.read_starts(root)
    mine = starts.get(sequence)
    if mine is None or lineage.newest(starts) != mine:
        return []  # we may be the zombie
    needed: set[int] = set()
    steps: set[int] = set()
    for number, limit in lineage.chain(starts):
        needed.add(number)
        for path in manifest.listed(lineage.directory(root, number)):
            step = manifest.step_of(path)
            if step is not None and (limit is None or step <= limit):
                steps.add(step)
        if len(steps) >= keep:
            return [n for n in taken if n < sequence and n not in needed]
    return []  # a short chain: an earlier run's snapshots may still be somebody's last
