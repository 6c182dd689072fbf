"""Decide which incarnation's snapshots count: the lineage fence, on disk and in a store.

Each incarnation (uid, attempt, round) owns a numbered folder: on a disk the number is taken by
exclusive creation, in a store it is drawn (remote/transfer.py). Before its first step it brings its
parent snapshot there and then writes a durable start record naming the parent. A loader follows
only the newest chain of start records, so what a zombie of an earlier incarnation commits or
removes later is on no chain: no lock, no clock.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import PeerLostError
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.disk import count, seal, unseal
from ddpjob_trainer.snapshot.ondisk.manifest import NewerFormatError

START = "start.json"
SIGNATURE = "start.hmac"
_MAX_PREDECESSORS = 32
_MAX_UID = 256
_MAX_START_BYTES = 128 << 10  # the longest uids in JSON take 99 KiB
_SIGNATURE_BYTES = 64  # of hexadecimal digits
#: Longer names are foreign: no job has a billion incarnations.
_NUMBER = re.compile("[0-9]{8,9}")
_NUMBERS = 10**9
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


class ForgedError(ValueError):
    """A start record that names a job which has not signed it. Every rank reads it so."""


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


def foreign(root: Path) -> list[str]:
    """Name what has a number for its name and is no directory of ours, cut and printable."""
    names = {name for name in disk.names(root) if name.isdecimal()}
    names -= {f"{number:08d}" for number in sequences(root)}
    return sorted(ascii(name[:40]) for name in names)


def directory(root: Path, sequence: int) -> Path:
    """Return the directory of an incarnation."""
    return root / f"{sequence:08d}"


def sequences(root: Path) -> list[int]:
    """Return all numbers taken on a disk, ascending, with or without a start record."""
    return _numbers(disk.directories(root))


def _numbers(names: Iterable[str]) -> list[int]:
    found = filter(_NUMBER.fullmatch, names)
    return sorted(number for name in found if name == f"{(number := int(name)):08d}")


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
    reader: Identity | None = None,
) -> dict[int, Start]:
    """Read every start record, by number. ``unread`` gets why one cannot be read, or is forged.

    ``reader``: whose job's records must be signed, where it has a secret.
    """
    starts: dict[int, Start] = {}
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
    for number in _forged(folders, starts, reader) if reader and reader.secret else ():
        del starts[number]
        if unread is not None:
            unread[number] = ForgedError("it names this job, which has not signed it: forged")
    return starts


def _forged(folders: Folders, starts: dict[int, Start], reader: Identity) -> set[int]:
    """Return which records of the reader's job are later than it could have left unsigned.

    A later incarnation ends the reader, and the latest one's snapshots are loaded. Older versions
    of this program sign nothing; once a job has signed, all that is later is signed.
    """
    own = {n: (s.attempt, s.round) for n, s in starts.items() if s.uid == reader.uid}
    signed = {n for n in own if _is_signed(folders, starts[n], reader.secret)}
    last = max((own[n] for n in signed), default=(reader.attempt, reader.round))
    return {n for n in own.keys() - signed if own[n] > last}


def _is_signed(folders: Folders, start: Start, secret: str) -> bool:
    try:
        found = folders.read(start.sequence, SIGNATURE, _SIGNATURE_BYTES)
    except (FileNotFoundError, disk.NotAFileError):
        return False
    return hmac.compare_digest(found, _signature(seal(asdict(start)), secret))


def _signature(record: bytes, secret: str) -> bytes:
    return hmac.digest(bytes.fromhex(secret), record, "sha256").hex().encode()


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


def chain(starts: dict[int, Start], head: Start | None) -> Iterator[tuple[int, int | None]]:
    """Yield (number, highest step that counts there, None: any) from a head on, newest first."""
    start = head
    limit: int | None = None
    while start is not None:
        yield start.sequence, limit
        if start.parent_sequence >= start.sequence:
            return
        limit = start.parent_step if limit is None else min(limit, start.parent_step)
        start = starts.get(start.parent_sequence)


def heads(starts: dict[int, Start], uid: str) -> list[Start]:
    """Return the heads of the chains that a job may go on from, the best first.

    Its own chain comes first: a record that another job, or a stranger, has written hides none of
    its snapshots. Jobs that began after it, and name it as a predecessor, are not asked.
    """
    left = {n: start for n, start in starts.items() if uid not in start.predecessors}
    found = []
    while left:
        own = {n: start for n, start in left.items() if start.uid == uid}
        head = newest(own or left)
        assert head is not None
        found.append(head)
        left = {n: start for n, start in left.items() if start.uid != head.uid}
    return found


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
    unread: Collection[int] = (),
) -> list[int]:
    """Return the numbers below ``own`` outside the folders that hold our chain's ``keep`` steps.

    None while the chain is short: an earlier run's snapshots may still be somebody's last.
    ``steps_of``: steps that count in a folder up to a limit. ``unread``: those whose record this
    rank cannot read now. A job that began later has the directory: then only our own are named.
    """
    needed: set[int] = set()
    found: set[int] = set()
    mine = starts[own]
    first = newest(starts) == mine
    for number, limit in chain(starts, mine):
        needed.add(number)
        found.update(steps_of(number, limit))
        if len(found) >= keep:
            # A number without a record may belong to a newer incarnation that is about to write
            # it, and would then be the head. Only what is below our parent is surely abandoned.
            claims = {n for n in taken if n < mine.parent_sequence and first}
            begun = {n for n, start in starts.items() if first or start.uid == mine.uid}
            over = (claims - set(unread)) | begun
            return sorted(n for n in over if n < own and n not in needed)
    return []


def last_of_others(folders: Folders, starts: dict[int, Start], own: int) -> set[int]:
    """Return the folders with the newest snapshot of each other job: only a user removes those.

    Runs without an operator or a launcher of ours have another uid each time, and are one job.
    Raises OSError.
    """

    def job(start: Start) -> str:
        return "local" if start.uid.startswith("local-") else start.uid

    last = {}
    for start in sorted(starts.values(), key=lambda s: (s.attempt, s.round, s.sequence)):
        if job(start) != job(starts[own]) and steps(folders, start.sequence, None):
            last[job(start)] = start.sequence
    return set(last.values())


def predecessors(starts: dict[int, Start], uid: str) -> tuple[str, ...]:
    """Return uids of earlier jobs, oldest first: carried on, for their records will go.

    A job that names this one came after it.
    """
    known = (s for _, s in sorted(starts.items()) if uid not in s.predecessors)
    return newest_uids([name for s in known for name in (*s.predecessors, s.uid)], uid)


def newest_uids(uids: Iterable[str], but: str) -> tuple[str, ...]:
    """Return a start record's part of them: each once, oldest first, without the job's."""
    ordered = dict.fromkeys(uids)
    ordered.pop(but, None)
    return tuple(ordered)[-_MAX_PREDECESSORS:]


def refuse_if_stale(starts: dict[int, Start], identity: Identity) -> None:
    """Raise PeerLostError when a later incarnation of this job has started."""
    mine = (identity.attempt, identity.round)
    for start in starts.values():
        if start.uid == identity.uid and (start.attempt, start.round) > mine:
            raise PeerLostError(
                f"attempt {start.attempt} round {start.round} of this job has already started; this"
                f" is attempt {identity.attempt} round {identity.round}, which is out of date and"
                " ends"
            )


def claim(root: Path) -> int:
    """Take the next number by creating its directory. Raises OSError.

    It is above all that have a start record, and so above its parent's. Names that something else
    has are left out, though they be the highest of all.
    """
    for _ in range(_CLAIMS):
        begun = (n for n in sequences(root) if disk.exists(directory(root, n) / START))
        above, taken = max(begun, default=0) + 1, {*_numbers(disk.names(root))}
        numbers = itertools.chain(range(above, _NUMBERS), range(_NUMBERS - 1, 0, -1))
        sequence = next((n for n in numbers if n not in taken), 0)
        try:
            disk.make_directory(directory(root, sequence))
        except FileExistsError:
            continue
        disk.sync_directory(root)
        return sequence
    raise FileExistsError(
        errno.EEXIST, "foreign entries take the names of new directories; remove them", str(root)
    )


def write_start(root: Path, start: Start, secret: str = "") -> None:
    """Make an incarnation part of the lineage, durably. Raises OSError."""
    for name, content in records(start, secret):
        disk.commit(directory(root, start.sequence) / name, content)


def records(start: Start, secret: str) -> list[tuple[str, bytes]]:
    """Return what to write, in this order: names and contents. ``secret``: of its job."""
    record = seal(asdict(start))
    signed = [(SIGNATURE, _signature(record, secret))] if secret else []
    return [*signed, (START, record)]
