"""Bring an object store's newest snapshot to a disk that has none as new.

Called by remote/process.py. It becomes an incarnation on disk under the name that it has in the
store, and resume.py then finds and checks it like any other.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import (
    DataFile,
    InvalidSnapshotError,
    Manifest,
    NewerFormatError,
)
from ddpjob_trainer.snapshot.remote.store import Store
from ddpjob_trainer.snapshot.remote.upload import read

Tell = Callable[[str], None]
_NAMED = 3  # of what failed


def fetch(
    store: Store,
    root: Path,
    identity: Identity,
    *,
    resume: bool,
    tell: Tell,
    alive: Callable[[], None] = lambda: None,
) -> int | None:
    """Bring the newest snapshot and return its step, None if nothing newer is there.

    ``alive`` is called as bytes come. Raises PeerLostError when a later incarnation has uploaded
    already, ConfigError when only a newer program can read what is there, OSError, and what the
    protocol's library raises.
    """
    known, newer = store.starts(identity)
    if identity.unique:
        lineage.refuse_if_stale(known, identity)
    if foreign := store.foreign():
        tell(f"{store.url} holds {len(foreign)} foreign folders, such as {foreign[0]}")
    heads = [h for h in lineage.heads(known, identity.uid) if resume or h.uid == identity.uid]
    if not (heads or resume):
        return None
    disk.make_directories(root)
    on_disk = lineage.Disk(root)
    starts = lineage.read_starts(on_disk)
    local = next(iter(lineage.heads(starts, identity.uid)), None)
    held = any(lineage.steps(on_disk, *one) for one in lineage.chain(starts, local))
    if held and not (heads and _is_newer(heads[0], local)):
        return None
    failed, last = list[str](), None
    for head, number, step in _candidates(store, known, heads):
        if failed and head != last:
            break  # only a chain without any snapshot hides none of an earlier job
        last = head
        try:
            _bring(store, root, number, step, head, identity, alive)
        except (InvalidSnapshotError, FileNotFoundError) as error:
            tell(f"{store.url}: the snapshot of step {step} is passed over: {error}")
            failed.append(f"step {step}: {error}")
            newer += [error] if isinstance(error, NewerFormatError) else []
        else:
            return step
    if newer:
        raise newer[0].refusal  # rather than start from nothing
    if resume and not failed:
        failed = _without_a_record(store, known)
    if failed and not held:
        raise ConfigError(
            f"no snapshot in {store.url} is usable, and there was one, so training does not begin"
            f" anew: {'; '.join(failed[:_NAMED])}. Put the objects back. To begin anew, delete the"
            " job and apply it with snapshot.resume: Never, or upload to another place"
        )
    return None


def _candidates(
    store: Store, known: dict[int, Start], heads: list[Start]
) -> Iterator[tuple[Start, int, int]]:
    """Yield head, number and step of all that may be brought, the best first."""
    for head in heads:
        for number, limit in lineage.chain(known, head):
            for step in reversed(lineage.steps(store, number, limit)):
                yield head, number, step


def _without_a_record(store: Store, known: dict[int, Start]) -> list[str]:
    found = ((n, lineage.steps(store, n, None)) for n in store.numbers() if n not in known)
    return [f"folder {n} has no valid {lineage.START}, and step {s[-1]}" for n, s in found if s]


def _is_newer(remote: Start, local: Start | None) -> bool:
    """Tell whether the disk's newest incarnation came before that of the store.

    Where neither knows of the other the disk, which is written first, is right.
    """
    if local is None:
        return True
    if local.uid == remote.uid:
        return (remote.attempt, remote.round) > (local.attempt, local.round)
    return local.uid in remote.predecessors


def _bring(
    store: Store,
    root: Path,
    number: int,
    step: int,
    head: Start,
    identity: Identity,
    alive: Callable[[], None],
) -> None:
    found = read(store, number, step)
    _check_room(store, root, number, found)
    sequence = lineage.claim(root)
    where = lineage.directory(root, sequence)
    try:
        for file in found.files:
            disk.write_new(where / file.name, _checked(store, number, file, alive))
        disk.commit(where / manifest.file_name(step), found.encode())
        # In the name of the newest incarnation: what follows it is newer than that.
        start = replace(head, sequence=sequence, parent_sequence=0, parent_step=-1)
        lineage.write_start(root, start, identity.secret)
    except BaseException:
        disk.remove_tree(where)
        raise


def _check_room(store: Store, root: Path, number: int, found: Manifest) -> None:
    """Check sizes before anything is fetched: a manifest may claim terabytes."""
    for file in found.files:
        size = store.size(number, file.name)
        if size != file.bytes:
            raise InvalidSnapshotError(f"{file.name} has {size} bytes instead of {file.bytes}")
    room = os.statvfs(root)
    free, needed = room.f_bavail * room.f_frsize, sum(file.bytes for file in found.files)
    if needed > free:
        text = f"the snapshot takes {needed} bytes, and there is room for {free}"
        raise OSError(errno.ENOSPC, text, str(root))


def _checked(
    store: Store, number: int, file: DataFile, alive: Callable[[], None]
) -> Iterator[bytes]:
    crc, size = 0, 0
    for piece in store.pieces(number, file.name):
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if size > file.bytes:
            break
        alive()
        yield piece
    if size != file.bytes or crc != file.crc32:
        raise InvalidSnapshotError(f"{file.name} does not match its checksum")
