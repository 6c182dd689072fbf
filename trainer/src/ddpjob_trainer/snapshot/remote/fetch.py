"""Bring the newest snapshot of an object store to a disk that has nothing as new.

It becomes an incarnation on disk like any other, under the name that it has in the store, and is
then found, verified and taken over like any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import (
    DataFile,
    InvalidSnapshotError,
    NewerFormatError,
)
from ddpjob_trainer.snapshot.remote import incarnations
from ddpjob_trainer.snapshot.remote.store import Store

Tell = Callable[[str], None]


def fetch(
    store: Store,
    root: Path,
    identity: Identity,
    *,
    resume: bool,
    tell: Tell,
    alive: Callable[[], None] = lambda: None,
) -> int | None:
    """Return the step that was brought, None: what is on disk is as new, or there is none.

    ``alive`` is called as bytes come. Raises PeerLostError when a later incarnation has uploaded
    already, ConfigError when only a newer program can read what is there, OSError, and what the
    protocol's library raises.
    """
    newer: list[NewerFormatError] = []
    known = incarnations.starts(store, newer)
    if identity.unique:
        lineage.refuse_if_stale(known, identity)
    head = lineage.newest(known)
    if head is None and newer and resume:
        raise newer[0].refusal
    if head is None or not (resume or head.uid == identity.uid):
        return None
    root.mkdir(parents=True, exist_ok=True)
    local = lineage.read_starts(root)
    if _holds_any(root, local) and not _is_newer(head, lineage.newest(local)):
        return None
    for number, step in incarnations.counting(store, known):
        try:
            _bring(store, root, number, step, head, alive)
        except NewerFormatError as error:
            tell(f"{store.url}: the snapshot of step {step} is passed over: {error}")
            newer.append(error)
        except (InvalidSnapshotError, FileNotFoundError) as error:
            tell(f"{store.url}: the snapshot of step {step} is passed over: {error}")
        else:
            return step
    if newer:
        raise newer[0].refusal  # rather than start from nothing
    return None


def _holds_any(root: Path, local: dict[int, Start]) -> bool:
    """Whether there is a manifest on the disk's newest chain."""
    for number, limit in lineage.chain(local):
        steps = map(manifest.step_of, manifest.listed(lineage.directory(root, number)))
        if any(step is not None and (limit is None or step <= limit) for step in steps):
            return True
    return False


def _is_newer(remote: Start, local: Start | None) -> bool:
    """Whether the disk's newest incarnation came before that of the store.

    Where neither knows of the other the disk, which is written first, is right.
    """
    if local is None:
        return True
    if local.uid == remote.uid:
        return (remote.attempt, remote.round) > (local.attempt, local.round)
    return local.uid in remote.predecessors


def _bring(
    store: Store, root: Path, number: int, step: int, head: Start, alive: Callable[[], None]
) -> None:
    found = incarnations.read(store, number, step)
    sequence = lineage.claim(root)
    where = lineage.directory(root, sequence)
    try:
        for file in found.files:
            pieces = _checked(store, incarnations.folder(number), file, alive)
            disk.write_new(where / file.name, pieces)
        temporary = where / f"{manifest.file_name(step)}.tmp"
        disk.write_new(temporary, [found.encode()])
        disk.publish(temporary, where / manifest.file_name(step))
        # In the name of the newest incarnation: what follows it is newer than that.
        lineage.write_start(
            root, replace(head, sequence=sequence, parent_sequence=0, parent_step=-1)
        )
    except BaseException:
        disk.remove_tree(where)
        raise


def _checked(
    store: Store, folder: str, file: DataFile, alive: Callable[[], None]
) -> Iterator[bytes]:
    crc, size = 0, 0
    for piece in store.pieces(folder, file.name):
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if size > file.bytes:
            break
        alive()
        yield piece
    if size != file.bytes or crc != file.crc32:
        raise InvalidSnapshotError(f"{file.name} does not match its checksum")
