"""Bring an object store's newest snapshot to a disk that has none as new.

Called by remote/process.py. It becomes an incarnation on disk under the name that it has in the
store, and resume.py then finds and checks it like any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import DataFile, InvalidSnapshotError, NewerFormatError
from ddpjob_trainer.snapshot.remote.store import Store
from ddpjob_trainer.snapshot.remote.upload import read

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
    """Bring the newest snapshot and return its step, None if nothing newer is there.

    ``alive`` is called as bytes come. Raises PeerLostError when a later incarnation has uploaded
    already, ConfigError when only a newer program can read what is there, OSError, and what the
    protocol's library raises.
    """
    known, newer = store.starts()
    if identity.unique:
        lineage.refuse_if_stale(known, identity)
    head = lineage.newest(known)
    if head is None and newer and resume:
        raise newer[0].refusal
    if head is None or not (resume or head.uid == identity.uid):
        return None
    root.mkdir(parents=True, exist_ok=True)
    disk_folders = lineage.Disk(root)
    local = lineage.read_starts(disk_folders)
    held = any(lineage.steps(disk_folders, *one) for one in lineage.chain(local))
    if held and not _is_newer(head, lineage.newest(local)):
        return None
    for number, limit in lineage.chain(known):
        for step in reversed(lineage.steps(store, number, limit)):
            try:
                _bring(store, root, number, step, head, alive)
            except (InvalidSnapshotError, FileNotFoundError) as error:
                tell(f"{store.url}: the snapshot of step {step} is passed over: {error}")
                newer += [error] if isinstance(error, NewerFormatError) else []
            else:
                return step
    if newer:
        raise newer[0].refusal  # rather than start from nothing
    return None


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
    store: Store, root: Path, number: int, step: int, head: Start, alive: Callable[[], None]
) -> None:
    found = read(store, number, step)
    sequence = lineage.claim(root)
    where = lineage.directory(root, sequence)
    try:
        for file in found.files:
            disk.write_new(where / file.name, _checked(store, number, file, alive))
        disk.commit(where / manifest.file_name(step), found.encode())
        # In the name of the newest incarnation: what follows it is newer than that.
        lineage.write_start(
            root, replace(head, sequence=sequence, parent_sequence=0, parent_step=-1)
        )
    except BaseException:
        disk.remove_tree(where)
        raise


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
