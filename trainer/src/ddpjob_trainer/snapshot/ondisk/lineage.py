"""Decide which incarnation's snapshots count: the lineage fence, on disk and in a store.

Each incarnation (uid, attempt, round) owns a numbered folder: on a disk the number is taken by
exclusive creation, in a store it is drawn (remote/upload.py). Before its first step it brings its
parent snapshot there and then writes a durable start record naming the parent. A loader follows
only the newest chain of start records, so what a zombie of an earlier incarnation commits or
removes later is on no chain: no lock, no clock.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import count, seal, unseal
from ddpjob_trainer.snapshot.ondisk.manifest import NewerFormatError

START = "start.json"
_MAX_PREDECESSORS = 32
_MAX_UID = 256
_MAX_START_BYTES = 128 << 10  # the longest uids in JSON take 99 KiB
_NUMBER = re.compile("[0-9]{8,}")
_CLAIMS = 1000


@dataclass(frozen=True, slots=True)
class Start:
    """A start record. ``parent_sequence`` 0: this incarnation began from nothing."""

    sequence: int
    uid: str
    attempt: int
    round: int
    parent_sequence: int = 0
    parent_step: int = -1
    predecessors: tuple[str, ...] = ()  # uids of earlier jobs, which must not come back


class Folders(Protocol):
    """The folders of all incarnations by their numbers: Disk, and remote.store.Store."""

    def numbers(self) -> list[int]:
        """Return all numbers taken, ascending, with or without a start record."""

    def names(self, number: int) -> list[str]:
        """Return the names in a folder. Raises OSError."""

    def read(self, number: int, name: str, most: int) -> bytes:
        """Return a file's bytes, of a longer one the first ``most + 1``. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The folders below a snapshot directory."""

    root: Path

    def numbers(self) -> list[int]:
        """Return all numbers taken, ascending, with or without a start record."""
        return sequences(self.root)

    def names(self, number: int) -> list[str]:
        """Return the names in a folder. Raises OSError."""
        return disk.names(directory(self.root, number))

    def read(self, number: int, name: str, most: int) -> bytes:
        """Return a file's bytes, of a longer one the first ``most + 1``. Raises OSError."""
        return disk.read_bounded(directory(self.root, number) / name, most)


def directory(root: Path, sequence: int) -> Path:
    """Return the directory of an incarnation."""
    return root / f"{sequence:08d}"


def sequences(root: Path) -> list[int]:
    """Return all numbers taken on a disk, ascending, with or without a start record."""
    names = filter(_NUMBER.fullmatch, disk.directories(root))
    return sorted(number for name in names if name == f"{(number := int(name)):08d}")


def read_start(folders: Folders, number: int) -> Start:
    """Return an incarnation's start record. Raises OSError, ValueError."""
    data = folders.read(number, START, _MAX_START_BYTES)
    if len(data) > _MAX_START_BYTES:
        raise ValueError(f"more than {_MAX_START_BYTES} bytes")
    return parse_start(unseal(data))


def parse_start(body: Any) -> Start:
    """Return what a start record says. Raises ValueError for what none of ours can say."""
    names = Start.__dataclass_fields__.keys()
    if isinstance(body, dict) and body.keys() > names:
        raise NewerFormatError("a start record with fields that are not known")
    if not isinstance(body, dict) or body.keys() != names:
        raise ValueError(f"a start record has the fields {', '.join(names)}")
    uids = body["predecessors"]
    if not isinstance(uids, list) or len(uids) > _MAX_PREDECESSORS:
        raise ValueError("predecessors must be a short list")
    for uid in (body["uid"], *uids):
        if not isinstance(uid, str) or len(uid) > _MAX_UID:
            raise ValueError("a uid must be a short text")
    for name in ("sequence", "attempt", "round", "parent_sequence"):
        count(body[name])
    count(body["parent_step"], least=-1)
    return Start(**{**body, "predecessors": tuple(uids)})


def read_starts(
    folders: Folders,
    unread: dict[int, Exception] | None = None,
    retry: Callable[[Callable[[], Start]], Start] = lambda read: read(),
) -> dict[int, Start]:
    """Read every start record, by number. ``unread`` gets why one cannot be read."""
    starts = {}
    for number in folders.numbers():
        try:
            start = retry(partial(read_start, folders, number))
        except FileNotFoundError:
            continue  # a claim that never started
        except (OSError, ValueError) as error:
            if unread is not None:
                unread[number] = error
            continue
        if start.sequence == number:
            starts[number] = start
    return starts


def newest(starts: dict[int, Start]) -> Start | None:
    """Return the head of the newest chain.

    The highest number tells the job, unless another job has taken over from it already; among
    that job's incarnations attempt and round decide. So a zombie, of this job or of a deleted
    one of its name, cannot take the lead by claiming late.
    """
    if not starts:
        return None
    over = {uid for start in starts.values() for uid in start.predecessors}
    uid = starts[max((n for n, s in starts.items() if s.uid not in over), default=max(starts))].uid
    ours = (start for start in starts.values() if start.uid == uid)
    return max(ours, key=lambda start: (start.attempt, start.round, start.sequence))


def chain(starts: dict[int, Start]) -> Iterator[tuple[int, int | None]]:
    """Yield (number, highest step that counts there, None: any), newest first."""
    start = newest(starts)
    limit: int | None = None
    while start is not None:
        yield start.sequence, limit
        if start.parent_sequence >= start.sequence:
            return
        limit = start.parent_step if limit is None else min(limit, start.parent_step)
        start = starts.get(start.parent_sequence)


def steps(folders: Folders, number: int, limit: int | None) -> list[int]:
    """Return the steps of a folder's manifests up to a limit, ascending. Raises OSError."""
    found = manifest.steps(folders.names(number))
    return [step for step in found if limit is None or step <= limit]


def unneeded(
    starts: dict[int, Start],
    taken: Iterable[int],
    own: int,
    keep: int,
    steps_of: Callable[[int, int | None], Collection[int]],
) -> list[int]:
    """Return the numbers below ``own`` outside the folders that hold our chain's ``keep`` steps.

    None while the chain is short: an earlier run's snapshots may still be somebody's last.
    ``steps_of``: steps that a folder holds up to a limit.
    """
    needed: set[int] = set()
    found: set[int] = set()
    for number, limit in chain(starts):
        needed.add(number)
        found.update(steps_of(number, limit))
        if len(found) >= keep:
            return [n for n in taken if n < own and n not in needed]
    return []


def predecessors(starts: dict[int, Start], uid: str) -> tuple[str, ...]:
    """Return uids of earlier jobs, oldest first: carried on, for their records will go."""
    known = (starts[sequence] for sequence in sorted(starts))
    return newest_uids([name for s in known for name in (*s.predecessors, s.uid)], uid)


def newest_uids(uids: Iterable[str], but: str) -> tuple[str, ...]:
    """Return a start record's part of them: each once, oldest first, without the job's."""
    ordered = dict.fromkeys(uids)
    ordered.pop(but, None)
    return tuple(ordered)[-_MAX_PREDECESSORS:]


def refuse_if_stale(starts: dict[int, Start], identity: Identity) -> None:
    """Raise PeerLostError when a later incarnation has started, ConfigError for another job.

    Two jobs that began in the same moment do not know of each other: the one with the highest
    number has the directory then, lest the other goes on from snapshots that are not its own.
    """
    mine = (identity.attempt, identity.round)
    head = newest(starts)
    for start in starts.values():
        if identity.uid in start.predecessors:
            raise _taken_over(start.uid, identity)
        if start.uid == identity.uid and head is not None and head.uid != identity.uid:
            raise _taken_over(head.uid, identity)
        if start.uid == identity.uid and (start.attempt, start.round) > mine:
            raise PeerLostError(
                f"attempt {start.attempt} round {start.round} of this job has already started;"
                f" this is attempt {mine[0]} round {mine[1]}, which is out of date and ends"
            )


def _taken_over(uid: str, identity: Identity) -> ConfigError:
    return ConfigError(
        f"another job has taken over this snapshot directory (uid {uid}); this process belongs to"
        f" uid {identity.uid} and ends. Give each job a directory of its own: another name, another"
        " snapshot.path or another volume"
    )


def claim(root: Path) -> int:
    """Take the next number by creating its directory. Raises OSError."""
    for turn in range(_CLAIMS):
        sequence = max(sequences(root), default=0) + 1 + turn  # something else may have the name
        try:
            disk.make_directory(directory(root, sequence))
        except FileExistsError:
            continue
        disk.sync_directory(root)
        return sequence
    raise FileExistsError(
        errno.EEXIST, "foreign entries take the names of new directories; remove them", str(root)
    )


def write_start(root: Path, start: Start) -> None:
    """Make an incarnation part of the lineage, durably. Raises OSError."""
    disk.commit(directory(root, start.sequence) / START, seal(asdict(start)))
