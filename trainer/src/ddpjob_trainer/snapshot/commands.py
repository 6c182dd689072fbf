"""Look at snapshots, check them, take them along: `ddpjob-trainer snapshot ls|verify|export`.

Reads only, but for what export writes to the path it is given; safe beside a running job.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from ddpjob_trainer import printing
from ddpjob_trainer.snapshot import weights
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError
from ddpjob_trainer.snapshot.reader import SnapshotToolError, find, read_snapshot
from ddpjob_trainer.snapshot.restore import load


def ls(root: Path) -> int:
    """Print one line per snapshot, newest last; return 0."""
    everything = list(find(root))  # before the head: it may refuse
    printing.show(f"{'DIRECTORY':<10} {'ATTEMPT':>7} {'ROUND':>5} {'STEP':>10} {'MIB':>9}  STATE")
    for found in everything:
        attempt, round_ = (found.start.attempt, found.start.round) if found.start else ("-", "-")
        try:
            size = sum(file.bytes for file in manifest.read(found.path).files) / 2**20
            state = "current" if found.counts else "superseded"
        except (InvalidSnapshotError, OSError) as error:
            if _is_gone(found.path):
                continue
            size, state = 0.0, f"invalid: {error}"
        where = found.path.parent.name
        printing.show(
            f"{where:<10} {attempt:>7} {round_:>5} {found.step:>10} {size:>9.1f}  {state}"
        )
    return 0


def verify(root: Path) -> int:
    """Check every byte of every snapshot; return 1 if any is damaged."""
    damaged = 0
    for found in find(root):
        name = f"{found.path.parent.name}/{found.path.name}"
        try:
            load.open_source(found.path.parent, manifest.read(found.path))
        except (InvalidSnapshotError, OSError) as error:
            if _is_gone(found.path):
                printing.show(f"{name}: removed meanwhile")
                continue
            damaged += 1
            printing.show(f"{name}: DAMAGED: {error}")
        else:
            printing.show(f"{name}: ok")
    return 1 if damaged else 0


def _is_gone(path: Path) -> bool:
    """Tell whether a running job's retention has removed it since, the manifest first."""
    with contextlib.suppress(OSError):
        return not disk.exists(path)
    return False


def export(root: Path, out: Path, *, step: int | None) -> int:
    """Write a snapshot's model to a safetensors file that needs nothing of ours; return 0.

    ``step`` None takes the newest that is valid, as a resume would. Tied weights come under each of
    their names. Raises SnapshotToolError, OSError.
    """
    if out.exists():
        raise SnapshotToolError(f"{out} exists; choose another file or remove it")
    found = read_snapshot(root, step)
    model = {name: found.model[name] for name in found.model if name not in found.caches}
    weights.write(out, model, {"step": str(found.step), "config": json.dumps(dict(found.config))})
    if extra := ", ".join(name or "the model" for name in found.extra_state()):
        printing.warn(
            f"warning: the extra state of {extra} is not in {out}, which holds tensors only: load"
            " it with strict=False, and the rest by read_snapshot(DIR).extra_state()"
        )
    size = out.stat().st_size / 2**20
    printing.warn(f"{out}: {len(model)} tensors of step {found.step}, {size:.1f} MiB")
    return 0
