"""Keep a rank's record of steps beyond the process's end, and compare with it.

replay.py writes an entry per step into a file of the launcher's directory. The next process
of the same rank finds there what the killed one computed. It never imports torch.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from ddpjob_contract import Differs

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
