"""Make staged parts durable beside training, in two threads of each rank.

manager.py calls save() on each rank. One thread finishes the copy, for which an update may have to
wait; the other writes it (ondisk/files.py) and posts the result (parts.py). Rank 0's
also commits the manifest when all parts are durable, has them read back (parts.py), and keeps
the outcomes until the training thread asks. Copying, writing, fsync and checksums release the
interpreter. A rank that ends leaves what was committed, and perhaps half a file that no manifest
names.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles, data_name, retain
from ddpjob_trainer.snapshot.save.layout import (
    Buffer,
    Captured,
    Copy,
    Draft,
    Pool,
    fingerprint,
    lay_out,
)
from ddpjob_trainer.snapshot.save.parts import PartReports, ReadBack, Report

_END_SECONDS = 5.0
_VERIFY_SECONDS = 15.0
_LOOK_SECONDS = 0.01  # how often rank 0 looks for the others' results
_LONG_SECONDS = 60.0  # a wait that is reported
_SLACK_BYTES = 64 << 10  # numbers in a header get longer

#: As Embedding(max_norm=...) does in its forward.
_CHANGED = (
    "a parameter, an average or an optimizer's state was changed before the next update while it"
    " was copied: change it after step.commit(), or use"
    " snapshots=ddp.Snapshots(staging='inline')"
)


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """A rank's part of one snapshot.

    ``versions``: those of the tensors that are copied later. ``report``: to be posted once it is
    durable, but for its checksum. ``draft``: on rank 0, of the manifest.
    """

    step: int
    begun: float  # perf_counter
    name: str
    buffer: Buffer
    later: tuple[Copy, ...]
    ready: Any  # the accelerator's mark at which the state was complete
    versions: tuple[int, ...]
    report: Report
    draft: Draft | None

    def changed(self) -> bool:
        """Tell whether something has changed what was to be copied; updates wait for the copy."""
        return self.versions != versions_of(self.later)


def versions_of(copies: tuple[Copy, ...]) -> tuple[int, ...]:
    """Return how often each tensor has been changed in place."""
    return tuple(tensor._version for _, tensor in copies)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a snapshot, known on rank 0. ``text`` says why it failed.

    ``verified``: another rank has read it back. Before that it is durable, and counts for nothing.
    ``never``: no later one can be made either.
    """

    step: int
    seconds: float = 0.0  # from the end of the step until durable, or verified
    text: str = ""
    verified: bool = False
    never: bool = False


class SnapshotWriter:
    """The threads, and what training may ask of them.

    A failed save is an outcome. What else ends a thread, a lost peer for one, is raised by the next
    call.
    """

    def __init__(
        self,
        rank: int,
        files: SnapshotFiles,
        reports: PartReports,
        accelerator: Accelerator,
        *,
        later: bool = False,
        parent: int = -1,
    ) -> None:
        self._rank = rank
        self._index = reports.writers.index(rank) if rank in reports.writers else -1
        self._later = later  # copy what no update changes in the thread
        self.reports = reports
        self._accelerator = accelerator
        self.pool = Pool(accelerator)
        self.files = files
        self.seconds = 0.0  # that this rank took to write its newest part
        self.gone = False  # the directory was, and older snapshots may be
        self._removing = threading.Lock()  # by retention, to which a manifest's draft is a leftover
        self._changed = threading.Condition()
        #: A number: prepare buffers.
        self._copies: SimpleQueue[StagedPart | int | None] = SimpleQueue()
        #: None: look at what has changed.
        self._writes: SimpleQueue[StagedPart | None] = SimpleQueue()
        self._parts: dict[int, StagedPart] = {}  # by step: being copied or written
        #: On rank 0, those not yet durable: when begun, and of what; None: it has failed here.
        self._snapshots: dict[int, tuple[float, Draft | None]] = {}
        #: On rank 0: begun, of those that are durable and are being read back.
        self._unverified: dict[int, float] = {}
        #: On rank 0. The parent is among them: all ranks have read it.
        self._verified = {parent}
        self._read_back = ReadBack(
            rank,
            reports.writers,
            reports.board,
            files.directory,
            self._was_read_back,
            writing=lambda: bool(self._parts),
        )
        self._outcomes: deque[Outcome] = deque()
        self._copying = 0
        self._closing = False
        self._error: Exception | None = None
        self._said_seconds = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (
                ("ddpjob-snapshots", self._copy_parts),
                ("ddpjob-snapshot-writer", self._write_parts),
                ("ddpjob-snapshot-reader", self._read_back.run),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- For the training thread ---------------------------------------------------------

    def prepare(self, captured: Captured) -> None:
        """Allocate buffers in the background."""
        with contextlib.suppress(ValueError):  # the first snapshot will say it
            size = lay_out(captured.structure, len(self.reports.writers), self._index).bytes
            self._copies.put(size + _SLACK_BYTES)

    def save(self, step: int, begun: float, captured: Captured, config: Mapping[str, Any]) -> None:
        """Stage this rank's part and have it written. Nobody waits for another.

        Raises PeerLostError, and ValueError for what no snapshot can hold.
        """
        self._said_seconds = 0.0
        try:
            part = self._stage(step, begun, captured, config)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            text = f"no memory to stage it in: {getattr(error, 'strerror', None) or error}"
            self._failed(step, begun, text)
        else:
            self.submit(part)

    def _stage(
        self, step: int, begun: float, captured: Captured, config: Mapping[str, Any]
    ) -> StagedPart:
        """Lay out this rank's part in a buffer. What may be copied later is not yet in it."""
        rank, nonce, accelerator = self._rank, self.files.nonce, self._accelerator
        flat, structure = captured.flat, captured.structure
        layout = lay_out(structure, len(self.reports.writers), self._index)
        now, later = layout.copies(captured)
        if not self._later:
            now, later = (*now, *later), ()
        buffer = self.pool.take(layout.bytes)
        assert buffer is not None, "free() said so"
        try:
            buffer.write(0, layout.header)
            buffer.copy(now, accelerator, accelerator.mark())
        except BaseException:
            buffer.busy = False
            raise
        report = Report(
            rank,
            layout.bytes,
            own=tuple((name, *shape) for name, shape in structure.own),
            fingerprint=fingerprint(structure),
        )
        draft = Draft(step, dict(config), structure, nonce, flat.tree, dict(flat.aliases))
        return StagedPart(
            step,
            begun,
            data_name(step, nonce, rank),
            buffer,
            later,
            accelerator.mark() if later else None,
            versions_of(later),
            report,
            draft if rank == 0 else None,
        )

    def submit(self, part: StagedPart) -> None:
        """Have a part copied and written. What came of it is posted in any case."""
        with self._changed:
            self._parts[part.step] = part
            self._copying += bool(part.later)
            if part.draft is not None:
                self._snapshots[part.step] = part.begun, part.draft
        if part.later:
            self._copies.put(part)
        else:
            self._writes.put(part)

    def _failed(self, step: int, begun: float, text: str) -> None:
        """Post that this rank has no part of a snapshot. Raises PeerLostError."""
        if self._rank == 0:
            with self._changed:
                self._snapshots[step] = begun, None
        self.reports.post(step, Report(self._rank, text=text))
        self._writes.put(None)

    def mark(self, step: int, facts: Mapping[str, Any]) -> str:
        """Add facts to the manifest of a durable snapshot; return why it failed. On rank 0."""
        path = self.files.directory / manifest.file_name(step)
        try:
            with self._removing:
                found = manifest.read(path)
                disk.commit(path, replace(found, config={**found.config, **facts}).encode())
        except (OSError, ValueError, manifest.InvalidSnapshotError) as error:
            return self._why(error)
        return ""

    def wait_copied(self) -> None:
        """Wait until nothing reads the parameters any more."""
        if self._copying:
            self._wait(lambda: not self._copying)

    def wait_written(self) -> None:
        """Wait until this rank's parts are written and posted."""
        self._wait(lambda: not self._parts)

    def hurry(self, on: bool) -> None:
        """Read back as fast as the volume gives it, for training waits."""
        self._read_back.hurry = on

    def wait_settled(self) -> None:
        """Wait on rank 0, after all ranks' posts, until all is durable or given up.

        And a while until it is verified: a pod that must end has little time.
        """
        self._wait(lambda: not self._snapshots)
        self._wait(lambda: not self._unverified, _VERIFY_SECONDS)

    def _wait(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error, seconds)
        self.check()

    def check(self) -> None:
        """Raise what has ended a thread."""
        if self._error is not None:
            raise self._error

    def outcomes(self) -> list[Outcome]:
        """Return what has been decided since the last call, on rank 0."""
        self.check()
        with self._changed:
            found = list(self._outcomes)
            self._outcomes.clear()
        return found

    def saving(self) -> bool:
        """Return whether a snapshot is not yet durable, on rank 0."""
        return bool(self._snapshots)

    def behind(self) -> str:
        """Return what there is to say of a skipped snapshot, on rank 0. Raises PeerLostError.

        Nothing else shows a volume that is stuck. A long wait is said once, and again each time it
        doubled: quick steps are ahead of a busy disk by nature.
        """
        with self._changed:
            step, (begun, _) = next(iter(self._snapshots.items()), (-1, (0.0, None)))
        seconds = time.perf_counter() - begun
        if step < 0 or seconds < max(_LONG_SECONDS, 2 * self._said_seconds):
            return ""
        self._said_seconds = seconds
        rank = max(0, self.reports.first_missing(step))
        return (
            f"older ones are still being written, that of step {step} for {seconds:.0f} s by"
            f" rank {rank}. Is its volume slow, or stuck?"
        )

    def close(self) -> None:
        """End the threads; what is not yet written may be lost. For the last call."""
        self._closing = True
        self._copies.put(None)
        self._writes.put(None)
        self._read_back.close()
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else it uses a buffer
            self.pool.close()

    # --- The threads ---------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # training raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _why(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError | disk.NotAFileError):
            self.gone = True
            return (
                f"{self.files.directory} is gone: it was removed, or another job has taken over"
                " this snapshot directory, and this run's snapshots may be gone with it"
            )
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

    def _copy_parts(self) -> None:
        self._accelerator.enter()
        while (task := self._copies.get()) is not None and not self._closing:
            if isinstance(task, int):
                with contextlib.suppress(Exception):  # who needs it tries again
                    self.pool.prepare(task)
            else:
                self._writes.put(task if self._copy(task) else None)

    def _copy(self, part: StagedPart) -> bool:
        try:
            part.buffer.copy(part.later, self._accelerator, part.ready)
            if part.changed():
                raise ValueError(_CHANGED)
        except Exception as error:  # whatever it is, rank 0 waits for a report
            self._post(part, Report(self._rank, text=self._why(error)))
            return False
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()
        return True

    def _write_parts(self) -> None:
        self._retain()  # what the start of this incarnation freed
        while not self._closing:
            with contextlib.suppress(Empty):
                part = self._writes.get(timeout=_LOOK_SECONDS if self._snapshots else None)
                if part is not None:
                    self._post(part, self._write(part))
            self._commit_complete()

    def _retain(self) -> None:
        if self._rank == 0:
            try:
                root, sequence, keep = self.files.root, self.files.sequence, self.files.keep
                with self._removing:
                    retain(root, sequence, keep, self._verified, set(self._unverified))
                with contextlib.suppress(OSError):  # a full disk, which has none to spare
                    disk.keep_reserve(root)
            except Exception as error:  # no reason to end training
                say(0, f"older snapshots were not removed: {self._why(error)}")

    def _write(self, part: StagedPart) -> Report:
        begun = time.perf_counter()
        try:
            with part.buffer.content(part.report.bytes) as content:
                crc = self.files.write(part.name, content)
        except Exception as error:  # whatever it is, rank 0 waits for a report
            return Report(self._rank, text=self._why(error))
        self.seconds = time.perf_counter() - begun
        return replace(part.report, crc32=crc)

    def _post(self, part: StagedPart, report: Report) -> None:
        """Tell what became of this rank's part, and free its buffer."""
        part.buffer.busy = False
        self.reports.post(part.step, report)
        if not report.text:
            self._read_back.expect(part.step)
        with self._changed:
            del self._parts[part.step]
            self._changed.notify_all()

    def _commit_complete(self) -> None:
        """Commit what all ranks have made durable, one after the other, on rank 0."""
        for step, (begun, draft) in list(self._snapshots.items()):
            reports = self.reports.complete(step)
            if reports is None:
                return  # nor can a later one be complete
            text = next((f"rank {r.rank}: " * bool(r.rank) + r.text for r in reports if r.text), "")
            never = False
            if not text:
                assert draft is not None, "it has reported that it failed here"
                try:
                    made = draft.manifest(reports)
                    self.files.commit(step, made.encode())
                except Exception as error:  # a manifest that nobody could read, for one
                    text, never = self._why(error), isinstance(error, ValueError)
            with self._changed:
                del self._snapshots[step]
                if not text:
                    self._unverified.pop(self._read_back.begin(step, made.files), None)
                    self._unverified[step] = begun
                took = time.perf_counter() - begun
                self._outcomes.append(Outcome(step, took, text, never=never))
                self._changed.notify_all()
            if text:
                self.files.discard(step)
            else:
                self._retain()

    def _was_read_back(self, step: int, text: str) -> None:
        """Take in that a snapshot was read back, or why it could not be, on rank 0."""
        if not text:
            self._verified.add(step)
        self._retain()
        with self._changed:
            seconds = time.perf_counter() - self._unverified.pop(step)
            self._outcomes.append(Outcome(step, seconds, text, verified=True))
            self._changed.notify_all()
