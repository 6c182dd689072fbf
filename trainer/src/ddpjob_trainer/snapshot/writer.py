"""Make staged parts durable beside training: a thread that talks to the keeper and to rank 0.

manager.py submits a Part after each save. Each rank's thread finishes its copy, has its keeper
write it, and posts the result (part_reports.py); rank 0's also has its keeper commit the manifest
when all parts are durable, and keeps the outcomes until the training thread asks.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import PeerLostError
from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.snapshot.keeper.client import END_SECONDS, KeeperProcess
from ddpjob_trainer.snapshot.keeper.process import GONE
from ddpjob_trainer.snapshot.layout import Draft
from ddpjob_trainer.snapshot.ondisk import lineage, manifest
from ddpjob_trainer.snapshot.ondisk.manifest import Manifest
from ddpjob_trainer.snapshot.part_reports import PartReports, Report
from ddpjob_trainer.snapshot.staging import Buffer, Copy, Pool, shared_file
from ddpjob_trainer.telemetry.console import say

_LOOK_MILLISECONDS = 10  # how often rank 0 looks for the others' results
_LONG_SECONDS = 60.0  # a wait that is told of

#: As Embedding(max_norm=...) does in its forward.
_CHANGED = (
    "a parameter, an average or an optimizer's state was changed before the next update while it"
    " was copied: change it after step.commit(), or use start(snapshot_staging='inline')"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this incarnation's snapshots go. ``writers``: the ranks that see the directory."""

    root: Path
    sequence: int
    nonce: str
    keep: int
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A rank's part of one snapshot.

    ``versions``: those of the tensors that are copied later. ``report``: what is told once it is
    durable, but for what only the keeper knows. ``draft``: on rank 0, of the manifest.
    """

    step: int
    begun: float  # perf_counter
    name: str
    bytes: int
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
    """What became of a snapshot, known on rank 0. ``text`` says why it failed."""

    step: int
    seconds: float = 0.0  # from the end of the step until durable
    text: str = ""


@dataclass(slots=True)
class Unfinished:
    """On rank 0: one that is not yet durable.

    ``facts``: all parts are durable, and these are added to the manifest.
    """

    step: int
    begun: float
    draft: Draft | None = None  # None, and no facts: it has failed here already
    facts: Mapping[str, Any] | None = None
    asked: bool = False  # the keeper was told to commit


class SnapshotWriter:
    """The thread, and what the training thread may ask of it. Its methods never raise OSError."""

    def __init__(
        self, rank: int, place: Place, reports: PartReports, accelerator: Accelerator
    ) -> None:
        self._rank = rank
        self._place = place
        self.reports = reports
        self._accelerator = accelerator
        self.pool = Pool(accelerator)
        self._changed = threading.Condition()
        self._queue: deque[Part | int] = deque()  # a number: prepare buffers of that size
        self._parts: dict[int, Part] = {}  # by step: being copied or written
        self._told: dict[int, Part] = {}  # those that the keeper is writing
        self._snapshots: dict[int, Unfinished] = {}
        self._outcomes: deque[Outcome] = deque()
        self._copying = 0
        self._closing = False
        self._broken = ""
        self._keeper: KeeperProcess | None = None
        self._known: dict[int, Buffer] = {}  # what the keeper has mapped
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ddpjob-snapshots", daemon=True)
        self._thread.start()

    # --- For the training thread ---------------------------------------------------------

    def prepare(self, size: int) -> None:
        """Start the keeper and allocate buffers in the background."""
        self._put(size)

    def submit(self, part: Part) -> None:
        """Have a part copied and written. What came of it is posted in any case."""
        with self._changed:
            broken = self._broken
            if not broken:
                self._parts[part.step] = part
                self._copying += 1
                if part.draft is not None:
                    self._snapshots[part.step] = Unfinished(part.step, part.begun, part.draft)
        if broken:  # since it was asked: nobody else would tell
            self.failed(part.step, part.begun, broken)
        else:
            self._put(part)

    def failed(self, step: int, begun: float, text: str) -> None:
        """Post that this rank has no part of a snapshot. Raises PeerLostError."""
        if self._rank == 0:
            with self._changed:
                if self._broken:
                    self._outcomes.append(Outcome(step, text=text))
                else:
                    self._snapshots[step] = Unfinished(step, begun)
        self.reports.post(step, Report(self._rank, text=text))
        os.eventfd_write(self._wake, 1)

    def mark(self, step: int, facts: Mapping[str, Any]) -> None:
        """Add facts to the manifest of a durable snapshot, on rank 0."""
        with self._changed:
            self._snapshots[step] = Unfinished(step, time.perf_counter(), facts=facts)
        os.eventfd_write(self._wake, 1)

    def wait_copied(self) -> None:
        """Wait until nothing reads the parameters any more."""
        if self._copying:
            with self._changed:
                self._changed.wait_for(lambda: not self._copying or self._broken)

    def wait_written(self) -> None:
        """Wait until this rank's parts are written and posted."""
        with self._changed:
            self._changed.wait_for(lambda: not self._parts or self._broken)

    def wait_settled(self) -> None:
        """Wait until all is durable or given up, on rank 0, when all ranks have posted."""
        with self._changed:
            self._changed.wait_for(lambda: not self._snapshots or self._broken)

    def outcomes(self) -> list[Outcome]:
        """Return what has been decided since the last call, on rank 0."""
        with self._changed:
            found = list(self._outcomes)
            self._outcomes.clear()
        return found

    def oldest(self) -> Unfinished | None:
        """Return the first that is not yet durable, on rank 0."""
        with self._changed:
            return next(iter(self._snapshots.values()), None)

    @property
    def broken(self) -> bool:
        """Tell whether the thread has given up: nothing more can be saved with this one."""
        return bool(self._broken)

    def close(self, seconds: float = END_SECONDS) -> None:
        """End thread and keeper, each within so many seconds; what is not yet written is lost.

        For the last call: it frees all that both used.
        """
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(seconds)
        if self._keeper is not None:
            self._keeper.end(seconds)
        if not self._thread.is_alive():  # else it is in the midst of a copy
            self.pool.close()
            os.close(self._wake)

    # --- The thread ----------------------------------------------------------------------

    def _put(self, task: Part | int) -> None:
        self._queue.append(task)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._accelerator.enter()
            while not self._closing:
                self._wait()
                while self._queue:
                    self._do(self._queue.popleft())
                self._hear()
                self._look()
        except Exception as error:
            # A lost peer ends training by itself; anything else must not.
            if not isinstance(error, PeerLostError):
                say(self._rank, f"what writes snapshots failed: {_why(error)}")
            self._give_up(_why(error))

    def _give_up(self, text: str) -> None:
        with self._changed:
            self._broken = text
            self._outcomes.extend(Outcome(step, text=text) for step in self._snapshots)
            self._snapshots.clear()
            parts = list(self._parts.values())
            self._changed.notify_all()
        for part in parts:
            with contextlib.suppress(Exception):
                self.reports.post(part.step, Report(self._rank, text=text))

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._keeper is not None:
            poll.register(self._keeper.channel, select.POLLIN)
        looks = any(not snapshot.asked for snapshot in list(self._snapshots.values()))
        poll.poll(_LOOK_MILLISECONDS if looks else None)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _do(self, task: Part | int) -> None:
        try:
            if isinstance(task, int):
                self._keeper_process()
                self.pool.prepare(task)
                return
            try:
                task.buffer.copy(task.later, self._accelerator, task.ready)
                if task.changed():
                    raise ValueError(_CHANGED)
            finally:
                with self._changed:
                    self._copying -= 1
                    self._changed.notify_all()
            self._with_keeper(lambda: self._tell_write(task))
        except Exception as error:
            # Whatever it is, rank 0 waits for a report. Preparing is tried again by who needs it.
            if isinstance(task, Part):
                self._written(task, Report(self._rank, text=_why(error)))

    def _keeper_process(self) -> KeeperProcess:
        """Return the running keeper, or a new one. Raises OSError."""
        if self._keeper is None:
            self._known.clear()
            self._keeper = KeeperProcess()
            place = self._place
            self._keeper.tell({
                "do": "open", "root": str(place.root.absolute()), "sequence": place.sequence,
                "nonce": place.nonce, "keep": place.keep, "retain": self._rank == 0,
            })  # fmt: skip
        return self._keeper

    def _with_keeper(self, tell: Callable[[], None]) -> None:
        """Tell the keeper something, a new one if it has died meanwhile. Raises OSError."""
        try:
            tell()
        except ConnectionError:
            self._lost_keeper()
            tell()

    def _tell_write(self, part: Part) -> None:
        keeper, buffer = self._keeper_process(), part.buffer
        if self._known.get(buffer.number) is not buffer:
            keeper.tell({"do": "buffer", "buffer": buffer.number, "bytes": buffer.size}, buffer.fd)
            self._known[buffer.number] = buffer
        keeper.tell({
            "do": "write", "step": part.step, "file": part.name, "buffer": buffer.number,
            "bytes": part.bytes,
        })  # fmt: skip
        self._told[part.step] = part

    def _hear(self) -> None:
        """Take in the keeper's answers."""
        if self._keeper is None:
            return
        answers = self._keeper.answers()
        if answers is None:
            self._lost_keeper()
            return
        for answer in answers:
            step, text = answer["step"], answer.get("text", "")
            if answer["do"] == "commit":
                self._settle(step, text)
            elif text:
                self._written(self._told[step], Report(self._rank, text=text))
            else:
                part = self._told[step]
                known = {"bytes": answer["bytes"], "crc32": answer["crc32"]}
                self._written(part, replace(part.report, **known))

    def _lost_keeper(self) -> None:
        """Give up what it had to do; the next snapshot gets a new one."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end()
        text = "its writer process ended"
        for part in list(self._told.values()):
            self._written(part, Report(self._rank, text=text))
        for snapshot in list(self._snapshots.values()):
            if snapshot.asked:
                self._settle(snapshot.step, text)

    def _written(self, part: Part, report: Report) -> None:
        """Post what became of this rank's part, and free its buffer."""
        part.buffer.busy = False
        self._told.pop(part.step, None)
        self.reports.post(part.step, report)
        with self._changed:
            del self._parts[part.step]
            self._changed.notify_all()

    def _look(self) -> None:
        """Commit what all ranks have made durable, one after the other, on rank 0."""
        for snapshot in list(self._snapshots.values()):
            if snapshot.asked:
                return
            marks = snapshot.facts is not None
            reports = [] if marks else self.reports.complete(snapshot.step)
            if reports is None:
                return  # nor can a later one be complete
            failures = [f"{_of(r.rank)}{r.text}" for r in reports if r.text]
            try:
                if not failures:
                    content = self._manifest(snapshot, reports).encode()
                    self._with_keeper(partial(self._tell_commit, snapshot.step, content))
                    snapshot.asked = True
                    return  # what becomes of it is told before anything is said of a later one
            except Exception as error:  # a manifest that nobody could read, for one
                failures = [_why(error)]
            self._settle(snapshot.step, failures[0])
            with contextlib.suppress(OSError):
                self._keeper_process().tell({"do": "discard", "step": snapshot.step})

    def _manifest(self, snapshot: Unfinished, reports: list[Report]) -> Manifest:
        """Make it of all parts, or anew of a durable one. Raises ValueError, OSError."""
        if snapshot.facts is None:
            assert snapshot.draft is not None, "it has reported that it failed here"
            return snapshot.draft.manifest(reports)
        where = lineage.directory(self._place.root, self._place.sequence)
        found = manifest.read(where / manifest.file_name(snapshot.step))
        return replace(found, config={**found.config, **snapshot.facts})

    def _tell_commit(self, step: int, content: bytes) -> None:
        fd = shared_file()
        try:
            os.pwrite(fd, content, 0)
            self._keeper_process().tell({"do": "commit", "step": step}, fd)
        finally:
            os.close(fd)

    def _settle(self, step: int, text: str) -> None:
        with self._changed:
            snapshot = self._snapshots.pop(step, None)
            if snapshot is not None:
                seconds = time.perf_counter() - snapshot.begun
                self._outcomes.append(Outcome(step, seconds, text))
            self._changed.notify_all()


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _of(rank: int) -> str:
    return f"rank {rank}: " if rank else ""


# --- What rank 0 says -------------------------------------------------------------------------


def failed(step: int, why: str, newest: int) -> str:
    """Tell of a snapshot that failed. ``newest``: step of the newest there is, -1: of none."""
    if why.endswith(GONE):
        left = "and this run's snapshots may be gone with it"
    else:
        left = f"the newest snapshot is {f'that of step {newest}' if newest >= 0 else 'none'}"
    return f"snapshot after step {step} failed: {why}; training goes on, {left}"


class BackpressureLog:
    """On rank 0: tells that snapshots are left out since older ones are still being written.

    Training goes on, and nothing else shows a volume that is stuck. A long wait is said once, and
    again each time it doubled.
    """

    def __init__(self) -> None:
        self._said = 0.0  # of how many seconds

    def over(self) -> None:
        """Begin anew: one can be made again."""
        self._said = 0.0

    def why(self, oldest: Unfinished | None, reports: PartReports) -> str:
        """Return what there is to say now, if anything. Raises PeerLostError."""
        seconds = time.perf_counter() - oldest.begun if oldest else 0.0
        # Quick steps are ahead of a busy disk by nature.
        if oldest is None or seconds < max(_LONG_SECONDS, 2 * self._said):
            return ""
        self._said = seconds
        # Once the manifest is being written all parts are there.
        rank = 0 if oldest.asked else max(0, reports.first_missing(oldest.step))
        return (
            f"older ones are still being written, that of step {oldest.step} for {seconds:.0f} s by"
            f" rank {rank}. Is its volume slow, or stuck?"
        )
