"""Which snapshots a directory holds, and which of them a resume would take. Reads only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddpjob_trainer.snapshot.load import Source, open_source
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError


class SnapshotToolError(Exception):
    """What the user asked for cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest on disk. ``counts``: on the newest chain, so a resume may take it."""

    path: Path
    step: int
    start: lineage.Start | None
    counts: bool


def choose(root: Path, step: int | None) -> tuple[Path, Source]:
    """Return the newest valid snapshot, of that step if one is named. Raises SnapshotToolError."""
    candidates = [found for found in find(root) if found.counts or step is not None]
    wanted = [found for found in candidates if step in (None, found.step)]
    for found in reversed(wanted):
        try:
            source = open_source(found.path.parent, manifest.read(found.path))
        except (InvalidSnapshotError, OSError) as error:
            print(f"{found.path.name} is passed over: {error}", file=sys.stderr)
        else:
            return found.path, source
    known = ", ".join(str(s) for s in sorted({found.step for found in candidates}))
    which = "no valid snapshot" if step is None else f"no valid snapshot of step {step}"
    raise SnapshotToolError(f"{root} holds {which}; steps there: {known or 'none'}")


def find(root: Path) -> Iterator[Found]:
    """Every manifest below root, by directory and step. Raises SnapshotToolError."""
    if not root.is_dir():
        raise SnapshotToolError(f"{root} is no directory; give <spec.snapshot.path>/<job name>")
    if not lineage.sequences(root):
        names = (name for name in sorted(disk.directories(root)) if name.isprintable())
        inner = list(islice((name for name in names if _holds_some(root / name)), 5))
        hint = f"; did you mean one of: {', '.join(inner)}" if inner else ""
        raise SnapshotToolError(f"{root} holds no snapshots{hint}")
    starts = lineage.read_starts(root)
    limits = dict(lineage.chain(starts))
    for sequence in lineage.sequences(root):
        try:
            paths = manifest.listed(lineage.directory(root, sequence))
        except OSError as error:  # removed meanwhile, or closed to this user
            print(f"{sequence:08d} is passed over: {error}", file=sys.stderr)
            continue
        for path in paths:
            step, limit = manifest.step_of(path), limits.get(sequence)
            if step is not None:
                counts = sequence in limits and (limit is None or step <= limit)
                yield Found(path, step, starts.get(sequence), counts)


def _holds_some(root: Path) -> bool:
    """Whether it may be meant: a folder of the program's own output, say, is not."""
    with contextlib.suppress(OSError):  # closed to this user
        return bool(lineage.sequences(root))
    return False
