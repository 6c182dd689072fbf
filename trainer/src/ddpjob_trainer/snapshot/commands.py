"""`ddpjob-trainer snapshot ls|verify|export`: look at snapshots, check them, take them along.

Reads only, but for what export writes to the path it is given; safe beside a running job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ddpjob_trainer.snapshot import load
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError, Manifest
from ddpjob_trainer.state.codec import unflatten


class SnapshotToolError(Exception):
    """What the user asked for cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest on disk. ``counts``: on the newest chain, so a resume may take it."""

    path: Path
    step: int
    start: lineage.Start | None
    counts: bool


def ls(root: Path) -> int:
    """Print one line per snapshot, newest last; return 0."""
    print(f"{'DIRECTORY':<10} {'ATTEMPT':>7} {'ROUND':>5} {'STEP':>10} {'MIB':>9}  STATE")
    for found in _find(root):
        attempt, round_ = (found.start.attempt, found.start.round) if found.start else ("-", "-")
        try:
            size = sum(file.bytes for file in manifest.read(found.path).files) / 2**20
            state = "current" if found.counts else "superseded"
        except (InvalidSnapshotError, OSError) as error:
            size, state = 0.0, f"invalid: {error}"
        where = found.path.parent.name
        print(f"{where:<10} {attempt:>7} {round_:>5} {found.step:>10} {size:>9.1f}  {state}")
    return 0


def verify(root: Path) -> int:
    """Check every byte of every snapshot; return 1 if any is damaged."""
    damaged = 0
    for found in _find(root):
        name = f"{found.path.parent.name}/{found.path.name}"
        try:
            manifest.verify(found.path.parent, manifest.read(found.path))
        except (InvalidSnapshotError, OSError) as error:
            damaged += 1
            print(f"{name}: DAMAGED: {error}")
        else:
            print(f"{name}: ok")
    return 1 if damaged else 0


def export(root: Path, out: Path, *, step: int | None, format_: str) -> int:
    """Write the model of a snapshot to one file that needs nothing of ours; return 0.

    ``step`` None takes the newest that is valid, as a resume would. Tied weights appear under
    each of their names. Raises SnapshotToolError, OSError.
    """
    if out.exists():
        raise SnapshotToolError(f"{out} exists; choose another file or remove it")
    path, content = _choose(root, step)
    try:
        state = unflatten(load.load(path.parent, content))
    except InvalidSnapshotError as error:
        raise SnapshotToolError(f"{path}: {error}") from error
    model, extra = _state_dict(state)
    temporary = out.with_name(out.name + ".tmp")
    try:
        if format_ == "torch":
            torch.save({**model, **extra}, temporary)
        else:
            about = {"format": "pt", "step": str(content.step)}
            save_file(model, temporary, metadata={**about, "config": json.dumps(content.config)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(out)
        disk.sync_directory(out.parent)
    finally:
        temporary.unlink(missing_ok=True)
    if extra and format_ != "torch":
        print(
            f"warning: {', '.join(extra)} is not in {out}, as safetensors hold tensors only:"
            " use --format torch, or load it with strict=False",
            file=sys.stderr,
        )
    size = out.stat().st_size / 2**20
    print(f"{out}: {len(model)} tensors of step {content.step}, {size:.1f} MiB", file=sys.stderr)
    return 0


def _state_dict(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What the model's state_dict() would hold: its tensors, and what get_extra_state() gave."""
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise SnapshotToolError("the snapshot holds no model")
    transient = set(state.get("transient", ()))
    # Each name gets memory of its own: safetensors refuses tensors that share it.
    tensors = {n: t.clone() for n, t in state["model"].items() if n not in transient}
    key = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    extra = {f"{n}.{key}" if n else key: value for n, value in state.get("extra", {}).items()}
    return tensors, extra


def _choose(root: Path, step: int | None) -> tuple[Path, Manifest]:
    """The newest valid snapshot, of that step if one is named."""
    candidates = [found for found in _find(root) if found.counts or step is not None]
    wanted = [found for found in candidates if step in (None, found.step)]
    for found in reversed(wanted):
        try:
            content = manifest.read(found.path)
            manifest.verify(found.path.parent, content)
        except (InvalidSnapshotError, OSError) as error:
            print(f"{found.path.name} is passed over: {error}", file=sys.stderr)
        else:
            return found.path, content
    known = ", ".join(str(s) for s in sorted({found.step for found in candidates}))
    which = "no valid snapshot" if step is None else f"no valid snapshot of step {step}"
    raise SnapshotToolError(f"{root} holds {which}; steps there: {known or 'none'}")


def _find(root: Path) -> Iterator[Found]:
    """Every manifest below root, by directory and step. Raises SnapshotToolError."""
    if not root.is_dir():
        raise SnapshotToolError(f"{root} is no directory; give <spec.snapshot.path>/<job name>")
    if not lineage.sequences(root):
        inner = sorted(name for name in disk.directories(root) if name.isprintable())
        hint = f"; did you mean one of: {', '.join(inner[:5])}" if inner else ""
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
