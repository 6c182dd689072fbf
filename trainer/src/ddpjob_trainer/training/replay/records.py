"""Keep one rank's record of its steps in a file that outlives the process, and compare with it.

replay.py writes an entry per step into a mapped file of the launcher's directory. The next process
of the same rank finds there what the killed one computed. It never imports torch.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Final

from ddpjob_contract import Differs

#: Steps that a record holds; older ones are overwritten.
CAPACITY: Final = 4096
KEY_BYTES: Final = 32
#: Step, hashes of batches, random numbers, losses and weights, the first loss.
_BODY: Final = Struct("<qQQQQd")
_CHECK: Final = Struct("<I")
_ENTRY_BYTES: Final = 64
_HEAD_BYTES: Final = 64
_MAGIC: Final = b"ddpjob replay 1\0"
BYTES: Final = _HEAD_BYTES + CAPACITY * _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rank computed in a step. ``step`` counts finished steps; a hash of 0 is not known."""

    step: int
    batches: int
    random: int
    losses: int
    weights: int
    first_loss: float


def encode(entry: Entry) -> bytes:
    """Return an entry's bytes, with a checksum: a kill may leave half of them."""
    body = _BODY.pack(
        entry.step, entry.batches, entry.random, entry.losses, entry.weights, entry.first_loss
    )
    return (body + _CHECK.pack(zlib.crc32(body))).ljust(_ENTRY_BYTES, b"\0")


def decode(data: bytes) -> Entry | None:
    """Read an entry's bytes; None if it is torn, or none was ever written."""
    body = data[: _BODY.size]
    if len(data) != _ENTRY_BYTES or _CHECK.unpack_from(data, _BODY.size)[0] != zlib.crc32(body):
        return None
    return Entry(*_BODY.unpack(body))


def difference(before: Entry, now: Entry) -> Differs | None:
    """Name the first thing that differs in a step, in the order in which a step comes to it.

    Losses and weights decide. Another batch or other random numbers explain a difference; alone
    they are none: a batch may carry a path or a time, and each step begins with a seed of its own.
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
    """Return where a rank's record is. Each run of a process has snapshots of its own."""
    name = blake2b(str(snapshots.absolute()).encode(), digest_size=4).hexdigest()
    return directory / f"rank-{rank}-{name}"


class Records:
    """The file of one rank, open for the next steps. ``key`` tells one run from another.

    ``found``: entries of earlier processes, by step; None: there is no record, or another run's.
    Raises OSError.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        head = (_MAGIC + key).ljust(_HEAD_BYTES, b"\0")
        old = b""
        with contextlib.suppress(FileNotFoundError):
            old = path.read_bytes()
        self.found: dict[int, Entry] | None = None
        if len(old) == BYTES and old.startswith(head):
            found = filter(None, map(decode, _slots(old)))
            self.found = {entry.step: entry for entry in found}
        else:
            old = b""
        self._path = path
        self._map = _create(path, old or head.ljust(BYTES, b"\0"))

    def put(self, entry: Entry) -> None:
        """Write an entry over what has its place, well below a microsecond."""
        at = _place(entry.step)
        self._map[at : at + _ENTRY_BYTES] = encode(entry)

    def forget_after(self, step: int) -> None:
        """Drop the entries of later steps: training has left their course."""
        for entry in map(decode, _slots(self._map[:])):
            if entry is not None and entry.step > step:
                at = _place(entry.step)
                self._map[at : at + _ENTRY_BYTES] = bytes(_ENTRY_BYTES)

    def remove(self) -> None:
        """Leave no file: the run is finished, and others may follow in this process."""
        self._path.unlink(missing_ok=True)


def _place(step: int) -> int:
    return _HEAD_BYTES + step % CAPACITY * _ENTRY_BYTES


def _slots(data: bytes) -> list[bytes]:
    return [data[at : at + _ENTRY_BYTES] for at in range(_HEAD_BYTES, len(data), _ENTRY_BYTES)]


def _create(path: Path, data: bytes) -> mmap.mmap:
    """Replace the file at once, so that a kill leaves the old one or the new."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Written, not truncated to size: a full memory file system is an error here, and not a
        # SIGBUS at a step.
        if os.pwrite(fd, data, 0) != len(data):
            raise OSError("no room")
        mapped = mmap.mmap(fd, len(data))
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return mapped


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
    """One rank's comparison of the steps that it does again with what was recorded of them."""

    def __init__(self, recorded: dict[int, Entry] | None = None) -> None:
        self._recorded = recorded or {}
        self.found = Finding()

    @property
    def pending(self) -> bool:
        """Whether recorded steps are still to be done again."""
        return bool(self._recorded)

    def add(self, entry: Entry) -> bool:
        """Compare a step; return whether it differs. Nothing is compared after a difference."""
        before, found = self._recorded.pop(entry.step, None), self.found
        if before is None:
            if self._recorded and entry.step >= max(self._recorded):
                self._recorded.clear()  # torn entries in between, or fewer steps than before
            return False
        found.what = difference(before, entry)
        if found.what is None:
            found.first, found.last = found.first or entry.step, entry.step
            return False
        found.step, found.before, found.now = entry.step, before.first_loss, entry.first_loss
        self._recorded.clear()
        return True
