"""Report each rank's part of a snapshot as durable, then have another rank read it back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ddpjob_trainer.comm.peer_loss import peer_loss
from ddpjob_trainer.comm.sealed import MOST_BYTES, Board
from ddpjob_trainer.errors import cannot_read
from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.ondisk.files import PAST_CACHE_BYTES
from ddpjob_trainer.snapshot.ondisk.manifest import DataFile, InvalidSnapshotError

# --- Durable --------------------------------------------------------------------------------------
# Nothing here waits, and training's collectives are not involved. Reports are sealed: with a
# forged one rank 0 would commit a snapshot that nobody can load, and retention would remove the
# good ones.

_CURE = "register fewer tensors with per_rank=True"
_KIND = "snapshot"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a rank's part. ``own``: (name, dtype, shape) of what only it has.

    ``fingerprint``: see layout.Structure. ``text`` says why it failed; empty: it is durable.
    """

    rank: int
    bytes: int = 0
    crc32: int = 0
    own: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    fingerprint: int = 0
    text: str = ""


class PartReports:
    """Shared by all ranks of one incarnation. Raises PeerLostError when rank 0 is gone."""

    def __init__(self, board: Board, writers: Sequence[int]) -> None:
        self.board = board
        self.writers = writers
        self._found: dict[int, dict[int, Report]] = {}  # by step and rank, on rank 0

    def post(self, step: int, report: Report) -> None:
        """Tell rank 0. Called once per rank and step."""
        record = json.dumps({one.name: getattr(report, one.name) for one in fields(report)})
        if len(record) > MOST_BYTES:
            why = f"the list of what it holds alone takes {len(record) >> 20} MiB, more than 7:"
            self.post(step, Report(report.rank, text=f"{why} {_CURE}"))
            return
        with peer_loss():
            self.board.post(_KIND, step, report.rank, record.encode())

    def first_missing(self, step: int) -> int:
        """Return a writer that has not reported, -1 when all have, on rank 0."""
        found = self._found.get(step, {})
        with peer_loss():
            missing = (rank for rank in self.writers if rank not in found)
            return next((r for r in missing if self.board.poll(_KIND, step, r) is None), -1)

    def complete(self, step: int) -> list[Report] | None:
        """Return all writers' reports in their order, None while some are missing, on rank 0."""
        found = self._found.setdefault(step, {})
        with peer_loss():
            for rank in self.writers:
                if rank in found:
                    continue
                record = self.board.poll(_KIND, step, rank)
                if record is None:
                    return None
                found[rank] = _report(json.loads(record))
            for rank in self.writers:
                self.board.remove(_KIND, step, rank)
        return list(self._found.pop(step).values())


def _report(record: dict[str, Any]) -> Report:
    own = tuple((name, dtype, tuple(shape)) for name, dtype, shape in record.pop("own"))
    return Report(**record, own=own)


# --- Read back ------------------------------------------------------------------------------------
# writer.py starts one per rank. Until all parts of a snapshot were read back in the right bits it
# counts for nothing: retention keeps the last one that was, and no status names it. Rank 0 tells
# each rank by a note (comm/sealed.py) which file to read, the one that the rank before it wrote;
# what one cannot read the next one tries. If that one can, the first is sick and ends, as a
# failed GPU would. Nothing is renamed or removed. A rank that falls behind leaves older snapshots
# out.

#: Of each rank, so that training's own reading finds the volume free; and while the next snapshot
#: is written, which comes first.
BYTES_PER_SECOND = 128 << 20
_BESIDE_WRITING = 32 << 20
_ASK, _ANSWER = "read-back", "read-back-answer"
_FIRST_SECONDS, _MOST_SECONDS = 0.005, 1.0  # between two looks for a note


class ReadBack:
    """One rank's part in it. ``settled(step, text)`` is called on rank 0; text: why it failed."""

    def __init__(
        self,
        rank: int,
        writers: Sequence[int],
        board: Board,
        directory: Path,
        settled: Callable[[int, str], None],
        writing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank = rank
        self._writers = writers
        self._board = board
        self._directory = directory
        self._settled = settled
        self._writing = writing
        self._changed = threading.Condition()
        self._expected: set[int] = set()  # steps about which rank 0 may ask
        self._next: tuple[int, tuple[DataFile, ...]] | None = None  # on rank 0
        self._asked = dict.fromkeys(writers, 0)
        self._closing = False
        self.hurry = False  # training waits

    # --- For the writer's thread ---------------------------------------------------------

    def expect(self, step: int) -> None:
        """Begin to look for what rank 0 asks: this rank has written its part."""
        with self._changed:
            self._expected.add(step)
            self._changed.notify_all()

    def begin(self, step: int, files: Sequence[DataFile]) -> int:
        """Have the files of a snapshot read back, on rank 0, in the order of the writers.

        Return the step of one that has been waiting and is left out for this, -1: of none.
        """
        with self._changed:
            before, self._next = self._next, (step, tuple(files))
            self._changed.notify_all()
        return before[0] if before else -1

    def close(self) -> None:
        """End soon."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # --- The thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Serve until close(). Raises PeerLostError; HardwareError where this rank is sick."""
        while not self._closing:
            with self._changed:
                self._changed.wait_for(self._has_work)
                task, self._next = self._next, None
            if self._rank:
                self._serve()
            elif task is not None:
                self._settled(task[0], self._verify(*task))

    def _has_work(self) -> bool:
        return self._closing or bool(self._expected if self._rank else self._next)

    def _serve(self) -> None:
        """Do what rank 0 asks about one snapshot."""
        while (order := self._await(f"{_ASK}-{self._rank}", 0, self._rank)) is not None:
            if "sick" in order:
                if order["sick"]:
                    raise cannot_read(self._rank, order["sick"])
                with self._changed:
                    self._expected = {s for s in self._expected if s > order["step"]}
                return
            answer = json.dumps(self.read(DataFile(**order))).encode()
            with peer_loss():
                self._board.post(_ANSWER, self._asked[self._rank] - 1, self._rank, answer)

    def _verify(self, step: int, files: Sequence[DataFile]) -> str:
        """Return why a snapshot could not be read back; empty: it could."""
        readers = [*self._writers[1:], self._writers[0]]
        wrong = self._read_by(dict(zip(readers, files, strict=True)))
        again = {self._after(rank): (rank, files[readers.index(rank)]) for rank in wrong}
        still = self._read_by({rank: file for rank, (_, file) in again.items()}) if again else {}
        able = {first for rank, (first, _) in again.items() if rank not in still}
        ill = {rank: wrong[rank][0] for rank in able if wrong[rank][1]}
        for rank in self._writers[1:]:
            self._ask(rank, {"sick": ill.get(rank, ""), "step": step})
        if self._rank in ill:
            raise cannot_read(self._rank, ill[self._rank])
        bad = sorted(wrong.keys() - able)
        return f"rank {bad[0]} cannot read it back: {wrong[bad[0]][0]}" if bad else ""

    def _after(self, rank: int) -> int:
        return self._writers[(self._writers.index(rank) + 1) % len(self._writers)]

    def _read_by(self, files: Mapping[int, DataFile]) -> dict[int, tuple[str, bool]]:
        """Have ranks read files; return what read() says by the ranks that cannot."""
        found: dict[int, tuple[str, bool]] = {}
        for rank, file in files.items():
            if rank != self._rank:
                order = {"name": file.name, "bytes": file.bytes, "crc32": file.crc32}
                self._ask(rank, order)
        if self._rank in files:
            found[self._rank] = self.read(files[self._rank])
        for rank in files.keys() - {self._rank}:
            answer = self._await(_ANSWER, rank, rank, self._asked[rank] - 1)
            found[rank] = answer or ("this rank ends", False)
        return {rank: answer for rank, answer in found.items() if answer[0]}

    def _ask(self, rank: int, order: Mapping[str, Any]) -> None:
        with peer_loss():
            number = self._asked[rank]
            self._board.post(f"{_ASK}-{rank}", number, 0, json.dumps(order).encode())
        self._asked[rank] += 1

    def _await(self, kind: str, sender: int, rank: int, number: int | None = None) -> Any:
        """Return the next note of a sender, None when this rank closes."""
        pause = _FIRST_SECONDS
        while not self._closing:
            at = self._asked[rank] if number is None else number
            with peer_loss():
                note = self._board.poll(kind, at, sender)
            if note is not None:
                if number is None:
                    self._asked[rank] += 1
                with peer_loss():
                    self._board.remove(kind, at, sender)
                return json.loads(note)
            with self._changed:
                more = self._changed.wait(pause)
            # Another snapshot was written: look as often as at first.
            pause = _FIRST_SECONDS if more else min(2 * pause, _MOST_SECONDS)
        return None

    def read(self, file: DataFile) -> tuple[str, bool]:
        """Return why a file cannot be read as it was written, and whether its bits are wrong.

        Empty: it can be.
        """
        last = time.monotonic()

        def slowly(count: int) -> None:
            nonlocal last
            rate = _BESIDE_WRITING if self._writing() else BYTES_PER_SECOND
            wait = last + count / rate - time.monotonic()
            if wait > 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self.hurry, wait)
            last = time.monotonic()
            if self._closing:
                raise InterruptedError("this rank ends")

        try:
            with manifest.opened(self._directory, file) as stream:
                # From the volume, not from this node's memory; and what training reads stays there.
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                wrong = manifest.checksum(stream, file, slowly) != file.crc32
                if file.bytes >= PAST_CACHE_BYTES:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except InvalidSnapshotError as error:
            return str(error), True
        except OSError as error:
            return str(error), False
        return (f"{file.name} does not match its checksum", True) if wrong else ("", False)
