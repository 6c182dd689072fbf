"""Keep a rank's record of steps beyond the process's end, and compare with it.

replay.py writes an entry per step into a file of the launcher's directory. The next process
of the same rank finds there what the killed one computed. It never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import torch

from ddpjob_contract import Differs
from ddpjob_trainer.data import generators
from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.failpoints import GATE, GATE_BYTES, OPEN
from ddpjob_trainer.snapshot.training_state import TrainingState, flat_sha256, weights_sha256
from ddpjob_trainer.state.codec import flatten

# --- Records, for the check of each restart -------------------------------------------------------

#: Steps that a record holds; older ones are overwritten.
CAPACITY: Final = 4096
KEY_BYTES: Final = 32
#: An Entry. None lies on two pages of memory, so a kill leaves it whole or not there.
_ENTRY: Final = Struct("<qQQQQd16x")
_MAGIC: Final = b"ddpjob replay 2\0"
BYTES: Final = _ENTRY.size * (1 + CAPACITY)


class Entry(NamedTuple):
    """What a rank computed in a step. ``step`` counts finished steps; a hash of 0 is not known."""

    step: int
    batches: int
    random: int
    losses: int
    weights: int
    first_loss: float


def difference(before: Entry, now: Entry) -> Differs | None:
    """Name the first difference in a step, in the order of its parts.

    Losses and weights decide. Another batch or other random numbers explain a difference; alone
    they are none: a batch may carry a path or a time, and each step begins with another seed.
    """
    weights = bool(before.weights and now.weights and before.weights != now.weights)
    if before.losses == now.losses and not weights:
        return None
    if before.batches != now.batches:
        return "batch"
    if before.losses == now.losses:
        return "weights"
    return "random numbers" if before.random != now.random else "loss"


def record_path(directory: Path, rank: int, snapshots: Path) -> Path:
    """Return where a rank's record is. Each run of a process has other snapshots."""
    name = blake2b(str(snapshots.absolute()).encode(), digest_size=4).hexdigest()
    return directory / f"rank-{rank}-{name}"


class Records:
    """The file of one rank, open for the next steps. ``key`` tells one run from another.

    ``found``: entries of earlier processes, by step; None: there is no record, or another run's.
    Raises OSError.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        head = (_MAGIC + key).ljust(_ENTRY.size, b"\0")
        old = b""
        with contextlib.suppress(FileNotFoundError):
            old = path.read_bytes()
        self.found: dict[int, Entry] | None = None
        if len(old) == BYTES and old.startswith(head):
            self.found = _entries(old)
        else:
            old = head.ljust(BYTES, b"\0")
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_bytes(old)  # all of it: a full memory file system is an error here, not at a step
        new.replace(path)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def put(self, entry: Entry) -> None:
        """Write an entry over what has its place, in about a microsecond."""
        self._write(entry.step, _ENTRY.pack(*entry))

    def forget_after(self, step: int) -> None:
        """Drop the entries of later steps: training has left their course."""
        for later in _entries(os.pread(self._fd, BYTES, 0)):
            if later > step:
                self._write(later, bytes(_ENTRY.size))

    def remove(self) -> None:
        """Leave no file: the run is finished, and others may follow in this process."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _write(self, step: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a step that is not recorded stops no training
            os.pwrite(self._fd, data, (1 + step % CAPACITY) * _ENTRY.size)


def _entries(data: bytes) -> dict[int, Entry]:
    found = map(Entry._make, _ENTRY.iter_unpack(data[_ENTRY.size :]))
    return {entry.step: entry for entry in found if entry.step}


@dataclass(slots=True)
class Finding:
    """One rank's finding. ``first``, ``last``: steps that were equal, 0: none.

    ``before``, ``now``: the first loss of the ``step`` that differs.
    """

    first: int = 0
    last: int = 0
    step: int = 0
    what: Differs | None = None
    before: float = math.nan
    now: float = math.nan


class Comparison:
    """One rank's comparison of the steps that it does again with the record of them."""

    def __init__(self, recorded: dict[int, Entry] | None = None) -> None:
        self._recorded = recorded or {}
        self.found = Finding()

    @property
    def pending(self) -> bool:
        """Tell whether recorded steps are still to be done again."""
        return bool(self._recorded)

    def add(self, entry: Entry) -> bool:
        """Compare a step; return whether it differs. Nothing is compared after a difference."""
        before, found = self._recorded.pop(entry.step, None), self.found
        if before is None:
            if self._recorded and entry.step >= max(self._recorded):
                self._recorded.clear()  # holes in between, or fewer steps than before
            return False
        found.what = difference(before, entry)
        if found.what is None:
            found.first, found.last = found.first or entry.step, entry.step
            return False
        found.step, found.before, found.now = entry.step, before.first_loss, entry.first_loss
        self._recorded.clear()
        return True


# --- Recorder, for `ddpjob chaos` -----------------------------------------------------------------
# One file per rank with a JSON line per event: where it began, the losses of every step, hashes
# at the end. Appended by every incarnation of the rank, one write per line, so a SIGKILL loses at
# most a line. Nothing is done outside a chaos run.

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

    def logged(self, step: int, what: str, value: float | Mapping[str, float]) -> None:
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
            parts["generators"] = generators.capture()
            parts |= {f"registered {n}": obj.state_dict() for n, obj in state.registered.items()}
            parts |= {f"own {n}": obj.state_dict() for n, obj in state.per_rank.items()}
        hashes = {name: flat_sha256(flatten(part)) for name, part in parts.items()}
        self._line("end", hashes=hashes | {"weights": weights_sha256(module)})
        self.wait(OPEN - 1)
