"""Write evidence in a thread, so that a disk that hangs or is full holds up nobody.

The launcher's reports/evidence puts files here and goes on. Only the newest content of a file is
kept, and only of a few files: what such a disk does not take is dropped.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddpjob_contract.evidence import EVIDENCE_DIR, Evidence
from ddpjob_trainer.evidence import bounds, folder
from ddpjob_trainer.evidence.folder import Place

_MOST_WAITING: Final = 4
#: Of a flight recorder's dump, before it is compressed.
_MOST_SOURCE: Final = 32 << 20
#: A write that takes longer is not waited for at the end.
_SLOW_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Flight:
    """A dump of NCCL's flight recorder, and the bytes that its copy may have."""

    rank: int
    source: Path
    most: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One file to write. ``prunes``: then remove what is beyond the bounds."""

    place: Place
    name: str
    body: Evidence
    prunes: bool = False
    flights: tuple[Flight, ...] = ()


class Writer:
    """Owns the thread, which begins with the first entry. ``say`` gets why it cannot write."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self._root = root
        self._say = say
        self._waiting: dict[tuple[str, str], Entry] = {}
        self._changed = threading.Condition()
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None
        self._said = ""
        self._since: int | None = None  # when this launcher first wrote here, by the disk's clock

    def put(self, entry: Entry) -> None:
        """Have a file written; never blocks."""
        with self._changed:
            key = (entry.place.name, entry.name)
            self._waiting.pop(key, None)
            self._waiting[key] = entry
            while len(self._waiting) > _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evidence", daemon=True)
                self._thread.start()

    def flush(self, seconds: float) -> None:
        """Wait until all is written, not for a disk that has been slow already."""
        with self._changed:
            if self._busy_since and time.monotonic() - self._busy_since > _SLOW_SECONDS:
                return
            self._changed.wait_for(lambda: not self._waiting and not self._busy_since, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                entry = self._waiting.pop(next(iter(self._waiting)))
                self._busy_since = time.monotonic()
            try:
                self._write(entry)
            except OSError as error:
                self._refused(error)
            finally:
                with self._changed:
                    self._busy_since = None
                    self._changed.notify_all()

    def _write(self, entry: Entry) -> None:
        body = entry.body.copy()
        with folder.opened(self._root, entry.place.name, make=True) as fd:
            if entry.flights:
                body["flight"] = [_copied(fd, one) for one in entry.flights]
            folder.write(fd, entry.name, bounds.encode(body))
            if self._since is None:
                self._since = os.fstat(fd).st_mtime_ns
        if entry.prunes:
            folder.prune(self._root, entry.place, self._since)

    def _refused(self, error: OSError) -> None:
        """Say once, for each reason, that nothing is kept."""
        reason = error.strerror or str(error)
        if reason != self._said:
            self._said = reason
            where = self._root / EVIDENCE_DIR
            self._say(f"last lines and stacks are not kept in {where}: {reason}")


def flight_name(rank: int) -> str:
    """Return the name of a dump's copy."""
    return f"rank-{rank}.nccl.gz"


def _copied(fd: int, flight: Flight) -> str:
    """Copy a dump, compressed; return the copy's name, or why there is none."""
    name = flight_name(flight.rank)
    with contextlib.suppress(OSError, ValueError):
        data = gzip.compress(_bounded(flight.source), compresslevel=6, mtime=0)
        if len(data) > flight.most:
            return f"rank {flight.rank}: {flight.source} has {len(data)} bytes even compressed"
        folder.write(fd, name, data)
        return name
    return f"rank {flight.rank}: {flight.source} was not readable"


def _bounded(source: Path) -> bytes:
    fd = os.open(source.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return folder.read(fd, source.name, _MOST_SOURCE)
    finally:
        os.close(fd)
