"""Find snapshots and read one from Python, tensor by tensor. Reads only, no pickle."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer import printing
from ddpjob_trainer.snapshot import weights
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.restore.load import Source, open_source
from ddpjob_trainer.state.codec import Flat, member, tensor_names, unflatten, without_numpys


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
            printing.warn(f"{found.path.name} is passed over: {error}")
        else:
            return found.path, source
    known = ", ".join(str(s) for s in sorted({found.step for found in candidates}))
    which = "no valid snapshot" if step is None else f"no valid snapshot of step {step}"
    raise SnapshotToolError(f"{root} holds {which}; steps there: {known or 'none'}")


def find(root: Path) -> Iterator[Found]:
    """Yield every manifest below root, by directory and step. Raises SnapshotToolError."""
    if not root.is_dir() or not lineage.sequences(root):
        raise SnapshotToolError(f"{root} holds no snapshots; give <spec.snapshot.path>/<job name>")
    starts = lineage.read_starts(lineage.Disk(root))
    limits = dict(lineage.chain(starts, lineage.newest(starts)))
    for sequence in lineage.sequences(root):
        try:
            paths = manifest.listed(lineage.directory(root, sequence))
        except OSError as error:  # removed meanwhile, or closed to this user
            printing.warn(f"{sequence:08d} is passed over: {error}")
            continue
        for path in paths:
            step, limit = manifest.step_of(path.name), limits.get(sequence)
            if step is not None:
                counts = sequence in limits and (limit is None or step <= limit)
                yield Found(path, step, starts.get(sequence), counts)


class Snapshot:
    """A valid snapshot. Values are read when they are asked for, each time into new memory.

    ``step``: after which it was made. ``config``: of the run that wrote it. ``model``: the names
    of model.state_dict(), its caches (non-persistent buffers) included, to CPU tensors; tied
    weights are there under each name. ``registered``: what state() can give.
    """

    def __init__(self, path: Path, source: Source) -> None:
        self.path = path
        self.step = source.manifest.step
        self.config = source.manifest.config
        self._source = source
        state = source.outline
        if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
            raise SnapshotToolError(f"{path} holds no model")
        self.model: Mapping[str, torch.Tensor] = _Tensors(self, tuple(state["model"]))
        self.caches = frozenset(state.get("transient", ()))
        self.registered = tuple(state.get("registered", {}))

    def state(self, name: str) -> Any:
        """Return what the state_dict() of a registered object gave: "optimizer" for one.

        Raises KeyError, OSError, SnapshotToolError when retention has removed it meanwhile.
        """
        return self.read("registered", name)

    def extra_state(self) -> dict[str, Any]:
        """Return what get_extra_state() of the model's modules gave, by the modules' names."""
        found: dict[str, Any] = self.read("extra") if "extra" in self._source.outline else {}
        return found

    def read(self, *path: str) -> Any:
        """Return one part of the state. Raises KeyError, OSError, SnapshotToolError.

        Numbers are Python's, where a resume gets numpy's back: an export is read without numpy.
        """
        found = self._source.manifest
        node = found.tree
        for name in path:
            node = member(node, name)
        names = {found.aliases.get(name, name) for name in tensor_names(node)}
        tensors = self._source.empty(names.__contains__)
        try:
            self._source.read(names.__contains__, tensors)
        except InvalidSnapshotError as error:
            raise SnapshotToolError(
                f"the snapshot of step {self.step} has changed since it was opened: {error}. The"
                " retention of a running job may have removed it: read again, or let it keep more"
                " (snapshot.keep)"
            ) from None
        return unflatten(Flat(without_numpys(node), tensors, dict(found.aliases)))


class _Tensors(Mapping[str, torch.Tensor]):
    """The model's tensors by name."""

    def __init__(self, snapshot: Snapshot, names: tuple[str, ...]) -> None:
        self._snapshot = snapshot
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._snapshot.read("model", name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_snapshot(directory: str | os.PathLike[str], step: int | None = None) -> Snapshot:
    """Open the newest valid snapshot of a run, or that of a step. Every byte is checked.

    ``directory``: <spec.snapshot.path>/<job name>. Safe beside a running job, as long as its
    retention leaves the snapshot. Raises SnapshotToolError where there is none, OSError.
    """
    return Snapshot(*choose(Path(directory), step))


# --- Commands: ls, verify and export --------------------------------------------------------------


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
