"""Copy finished snapshots of one incarnation to an object store, newest first, manifest last.

What is being copied is pinned by hard links, so that the disk's retention cannot take it away,
however slow the store is.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import PeerLostError
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError, Manifest
from ddpjob_trainer.snapshot.remote import incarnations
from ddpjob_trainer.snapshot.remote.store import Store

_PINS = "uploading"


class Uploader:
    """One incarnation's side. Everything may be tried again after an error."""

    def __init__(self, store: Store, root: Path, sequence: int, keep: int) -> None:
        self._store = store
        self._root = root
        self._directory = lineage.directory(root, sequence)
        self._pins = self._directory / _PINS
        self._start = lineage.read_start(root, sequence)
        self._keep = keep
        self._number = 0  # ours in the store, once drawn
        self._begun = False
        self.newest = -1

    def upload(self, step: int) -> None:
        """Copy the snapshot of a step, unless a newer one is there; again if it was marked since.

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
        """The parent first, then the start record: nobody else's retention can hurt it then."""
        known = incarnations.starts(self._store)
        start = self._start
        lineage.refuse_if_stale(known, Identity(start.uid, start.attempt, start.round, unique=True))
        self._number = self._number or incarnations.draw(incarnations.numbers(self._store))
        if start.parent_step >= 0:
            first = self._directory / manifest.file_name(start.parent_step)
            self.newest = start.parent_step if disk.exists(first) else step
            self._copy(self.newest)
        earlier = (*start.predecessors, *lineage.predecessors(known, start.uid))
        incarnations.write_start(
            self._store,
            replace(
                start,
                sequence=self._number,
                parent_sequence=self._parent(known),
                predecessors=lineage.newest_uids(earlier, start.uid),
            ),
        )
        self._begun = True

    def _parent(self, known: dict[int, Start]) -> int:
        """The number of our parent if it has written here as well, 0: its copy is all we have."""
        with contextlib.suppress(OSError, ValueError):
            parent = lineage.read_start(self._root, self._start.parent_sequence)
            names = {incarnations.identity(start): number for number, start in known.items()}
            return names.get(incarnations.identity(parent), 0)
        return 0

    def _copy(self, step: int) -> None:
        path = self._directory / manifest.file_name(step)
        found = manifest.read(path)
        self._pin(found)
        folder = incarnations.folder(self._number)
        for file in found.files:
            if self._store.size(folder, file.name) != file.bytes:
                self._store.put(self._pins / file.name, folder, file.name)
            if self._store.size(folder, file.name) != file.bytes:
                raise OSError(f"{self._store.url}: {file.name} did not arrive whole")
        self._store.write(folder, path.name, found.encode())
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
        """Keep the newest of ours and what our chain needs; the rest goes, the manifest first."""
        store, folder = self._store, incarnations.folder(self._number)
        ours = incarnations.steps(store, self._number)
        needed: set[str] = set()
        for step in ours[-self._keep :]:
            needed |= {file.name for file in incarnations.read(store, self._number, step).files}
        for step in ours[: -self._keep]:
            with contextlib.suppress(InvalidSnapshotError):
                names = {f.name for f in incarnations.read(store, self._number, step).files}
                store.remove(folder, manifest.file_name(step))
                for name in names - needed:
                    store.remove(folder, name)
        for number in self._unneeded():
            store.remove_folder(incarnations.folder(number))

    def _unneeded(self) -> list[int]:
        """As on disk: nobody prunes what is younger, nor while its own chain is short."""
        known = incarnations.starts(self._store)
        mine = known.get(self._number)
        if mine is None or lineage.newest(known) != mine:
            raise PeerLostError("a later incarnation uploads to the same place")
        needed: set[int] = set()
        steps: set[int] = set()
        for number, limit in lineage.chain(known):
            needed.add(number)
            found = incarnations.steps(self._store, number)
            steps |= {step for step in found if limit is None or step <= limit}
            if len(steps) >= self._keep:
                taken = incarnations.numbers(self._store)
                return [n for n in taken if n < self._number and n not in needed]
        return []
