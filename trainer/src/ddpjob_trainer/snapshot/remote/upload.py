"""Copy finished snapshots of one incarnation to an object store, newest first, manifest last.

Called by remote/process.py. A store has no exclusive creation and no hard links, so an incarnation
draws a number above all that it has seen and copies its parent snapshot there before its start
record; the records make the same chains as on a disk (ondisk/lineage.py). What is being copied is
pinned by hard links, so that the disk's retention cannot take it away, however slow the store is.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import PeerLostError
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import MAX_BYTES
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError, Manifest
from ddpjob_trainer.snapshot.remote.store import Store

_PINS = "uploading"
_DRAWN = 10**6
_MOST = 10**14  # see store.py


class Uploader:
    """One incarnation's side of the uploads. Everything may be tried again after an error."""

    def __init__(
        self, store: Store, root: Path, sequence: int, keep: int, secret: str = ""
    ) -> None:
        self._store = store
        self._root = root
        self._directory = lineage.directory(root, sequence)
        self._pins = self._directory / _PINS
        self._start = lineage.read_start(lineage.Disk(root), sequence)
        self._keep = keep
        self._secret = secret
        start = self._start
        self._identity = Identity(start.uid, start.attempt, start.round, unique=True, secret=secret)
        self._number = 0  # ours in the store, once drawn
        self._begun = False
        self.newest = -1

    def upload(self, step: int) -> None:
        """Copy a step's snapshot, unless a newer one is there. Do so again if it was marked since.

        Raises PeerLostError when this incarnation is out of date, InvalidSnapshotError, OSError,
        and what the protocol's library raises.
        """
        if not self._begun:
            self._begin(step)
        if step >= self.newest:
            self._copy(step)
            self.newest = step
            self._retain()

    def _begin(self, step: int) -> None:
        """Copy the parent, then write the start record: no other's retention can hurt it then."""
        known, _ = self._store.starts(self._identity)
        start = self._start
        lineage.refuse_if_stale(known, self._identity)
        self._number = self._number or draw(self._store.numbers())
        if start.parent_step >= 0:
            first = self._directory / manifest.file_name(start.parent_step)
            self.newest = start.parent_step if disk.exists(first) else step
            self._copy(self.newest)
        earlier = (*start.predecessors, *lineage.predecessors(known, start.uid))
        record = replace(
            start,
            sequence=self._number,
            parent_sequence=self._parent(known),
            predecessors=lineage.newest_uids(earlier, start.uid),
        )
        for name, content in lineage.records(record, self._secret):
            self._store.write(self._number, name, content)
        self._begun = True

    def _parent(self, known: dict[int, Start]) -> int:
        """Return our parent's number if it wrote here too. 0: its copy is all we have."""
        with contextlib.suppress(OSError, ValueError):
            on_disk = lineage.Disk(self._root)
            parent = lineage.read_start(on_disk, self._start.parent_sequence)
            whose = (parent.uid, parent.attempt, parent.round)
            return next((n for n, s in known.items() if (s.uid, s.attempt, s.round) == whose), 0)
        return 0

    def _copy(self, step: int) -> None:
        path = self._directory / manifest.file_name(step)
        found = manifest.read(path)
        self._pin(found)
        store, number = self._store, self._number
        for file in found.files:
            if store.size(number, file.name) != file.bytes:
                store.put(self._pins / file.name, number, file.name)
                if store.size(number, file.name) != file.bytes:
                    raise OSError(f"{store.url}: {file.name} did not arrive whole")
        store.write(number, path.name, found.encode())
        self._unpin()

    def _pin(self, found: Manifest) -> None:
        with contextlib.suppress(FileExistsError):
            disk.make_directory(self._pins)
        self._unpin({file.name for file in found.files})
        for file in found.files:
            pin = self._pins / file.name
            if disk.exists(pin) and pin.lstat().st_size != file.bytes:  # a copy that was killed
                disk.remove(pin)
            with contextlib.suppress(FileExistsError):
                disk.link_or_copy(self._directory / file.name, pin)

    def _unpin(self, needed: frozenset[str] | set[str] = frozenset()) -> None:
        for name in disk.names(self._pins):
            if name not in needed:
                disk.remove(self._pins / name)

    # --- Retention -------------------------------------------------------------------------

    def _retain(self) -> None:
        """Keep the newest of ours and what our chain needs. The rest goes, the manifest first."""
        store, number = self._store, self._number
        _trim(store, number, self._keep)
        unread: dict[int, Exception] = {}
        known, taken = lineage.read_starts(store, unread, reader=self._identity), store.numbers()
        mine = known.get(number)
        if mine is None or lineage.newest(known) != mine:
            raise PeerLostError("a later incarnation uploads to the same place")
        spared = lineage.last_of_others(store, known, number)
        for old in lineage.unneeded(
            known, taken, number, self._keep, partial(lineage.steps, store), unread
        ):
            if old in spared:
                _trim(store, old, 2)
            else:
                store.remove_folder(old)


def _trim(store: Store, number: int, keep: int) -> None:
    """Keep the newest snapshots of a folder."""
    steps = lineage.steps(store, number, None)
    needed: set[str] = set()
    for step in steps[-keep:]:
        needed |= {file.name for file in read(store, number, step).files}
    for step in steps[:-keep]:
        with contextlib.suppress(InvalidSnapshotError):
            names = {file.name for file in read(store, number, step).files}
            store.remove(number, manifest.file_name(step))
            for name in names - needed:
                store.remove(number, name)


def read(store: Store, number: int, step: int) -> Manifest:
    """Read a manifest. Raises InvalidSnapshotError, FileNotFoundError."""
    return manifest.decode(store.read(number, manifest.file_name(step), MAX_BYTES), step)


def draw(taken: list[int]) -> int:
    """Return a number above all others, that nobody draws at the same time."""
    highest = max((n for n in taken if n < _MOST - 2 * _DRAWN), default=0)
    return (highest // _DRAWN + 1) * _DRAWN + secrets.randbelow(_DRAWN)
