"""Record what each rank computes, bit for bit, for `ddpjob chaos` to compare.

One file per rank with a JSON line per event: where it began, the losses of every step, hashes
at the end. Appended by every incarnation of the rank, one write per line, so a SIGKILL loses at
most a line. Nothing is done outside a chaos run.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.failpoints import GATE, GATE_BYTES, OPEN
from ddpjob_trainer.snapshot.training_state import TrainingState, flat_sha256, weights_sha256
from ddpjob_trainer.state import rng
from ddpjob_trainer.state.codec import flatten

_LOOK_SECONDS = 0.001


class Recorder:
    """One process's record. Without a directory nothing is recorded."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._fd = -1
        self._gate: mmap.mmap | None = None
        if directory is None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(directory / f"rank-{rank}.jsonl", flags, 0o600)
        end = os.fstat(self._fd).st_size
        if end and os.pread(self._fd, 1, end - 1) != b"\n":
            os.write(self._fd, b"\n")  # the line before was cut off by a kill
        with (directory / GATE).open("rb") as file:
            self._gate = mmap.mmap(file.fileno(), GATE_BYTES, access=mmap.ACCESS_READ)

    def _line(self, event: str, **facts: Any) -> None:
        if self._fd >= 0:
            line = {"event": event, "at": time.monotonic(), **facts}
            os.write(self._fd, json.dumps(line).encode() + b"\n")

    def started(self, identity: Identity, total: int | None, settings: SnapshotSettings) -> None:
        """Record that this process has begun, and what the driver must know of the run."""
        place = {"attempt": identity.attempt, "round": identity.round, "pid": os.getpid()}
        snapshots = {"directory": str(settings.directory), "every": settings.every_steps}
        self._line("start", **place, total_steps=total, **snapshots)

    def resumed(self, step: int, epoch: int | None) -> None:
        """Record that training goes on after ``step`` steps. ``epoch``: steps in one, if known."""
        self._line("resume", step=step, epoch=epoch)

    def stepped(self, step: int, losses: Sequence[torch.Tensor | float]) -> None:
        """Record a step, with this rank's loss of each micro-batch."""
        if self._fd >= 0:
            self._line("step", step=step, losses=[float(loss).hex() for loss in losses])

    def told(self, step: int, what: str, value: float | Mapping[str, float]) -> None:
        """Record what the script has learned: its consequence may not show in losses."""
        if self._fd >= 0:
            named = value if isinstance(value, Mapping) else {"": value}
            values = {name: float(number).hex() for name, number in named.items()}
            self._line("told", step=step, what=what, values=values)

    def wait(self, step: int) -> None:
        """Stand at the gate after a step until the driver has made its kill."""
        if self._gate is None:
            return
        while step >= int.from_bytes(self._gate[:GATE_BYTES], "little"):
            time.sleep(_LOOK_SECONDS)

    def ended(self, state: TrainingState, *, committed: bool = True) -> None:
        """Hash all that a snapshot holds, part by part. Stand here until every kill was made.

        ``committed``: whether the loop was left after a commit(). Otherwise the snapshot is of the
        step before, and only parameters are sure to be now what they were then.
        """
        if self._fd < 0:
            return
        module = state.module
        parts: dict[str, Any] = {
            "parameters": dict(module.named_parameters(remove_duplicate=False))
        }
        if committed:
            parts["buffers"] = dict(module.named_buffers(remove_duplicate=False))
            parts["generators"] = rng.capture()
            parts |= {f"registered {n}": obj.state_dict() for n, obj in state.registered.items()}
            parts |= {f"own {n}": obj.state_dict() for n, obj in state.per_rank.items()}
        hashes = {name: flat_sha256(flatten(part)) for name, part in parts.items()}
        self._line("end", hashes=hashes | {"weights": weights_sha256(module)})
        self.wait(OPEN - 1)
