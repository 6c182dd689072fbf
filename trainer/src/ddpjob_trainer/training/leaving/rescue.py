"""Save the newest step at the launcher's word, before this survivor of a failure is ended.

A thread listens, for the main one may wait in a collective for a peer that is gone. launcher/watch/
rescue.py asks one survivor to write an ordinary snapshot of its newest boundary, and another one to
vouch: to hash its own. Only where both hold the same bits does the snapshot get its manifest, as
one flipped bit would become everybody's. Off unless environment.RESCUE is set.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.gradients.replica_check import hash_tensors
from ddpjob_trainer.liveness.marks import Marks, MarksWriter, socket_path
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.save.alone import write_alone
from ddpjob_trainer.snapshot.save.layout import Captured
from ddpjob_trainer.telemetry.console import say
from ddpjob_trainer.training.leaving.boundary import Boundary, ChangedError

#: After a lost peer the process ends by itself, unless its launcher asks within so many seconds.
_HOLD_SECONDS = 1.0
_PACE_STEPS = 20  # whose mean is the time of a step


class Rescue:
    """One process's side of it. ``hold()`` and the thread may run before, beside and after a step.

    ``directory``: the launcher's, for this round.
    """

    def __init__(self, directory: Path, world: World, snapshots: SnapshotManager) -> None:
        self._directory, self._world, self._snapshots = directory, world, snapshots
        self._boundary: Boundary | None = None
        self._config: Callable[[], Mapping[str, Any]] = dict
        self._marks: MarksWriter | None = None
        self._listener: socket.socket | None = None
        self._asked, self._over = threading.Event(), threading.Event()
        self._until = 0.0  # monotonic: when the launcher waits no longer
        self._said = False
        self._last, self._paced, self._pace = 0.0, 0, 0.0  # of steps: the end, how many, seconds

    # --- For the training thread ------------------------------------------------------------

    def begin(self, boundary: Boundary, config: Callable[[], Mapping[str, Any]], done: int) -> None:
        """Begin to listen, ``done`` steps having ended. ``config``: of a snapshot."""
        self._boundary, self._config = boundary, config
        boundary.take(done)
        try:
            self._marks = MarksWriter(self._directory, self._world.rank)
            self._listener = _listen(socket_path(self._directory, self._world.rank))
        except OSError as error:
            boundary.why_not = boundary.why_not or f"its launcher cannot be heard: {error}"
        else:
            threading.Thread(target=self._serve, name="ddpjob-rescue", daemon=True).start()
        self._mark()

    def before_update(self) -> None:
        """Keep the parameters from who reads them, and who reads them from an update."""
        if self._boundary is not None:
            self._boundary.before_update()
            if self._marks is not None:
                self._marks.in_flux()

    def step_ended(self, done: int) -> None:
        """Take the boundary at the end of a step's body, before the ranks hear one another."""
        if self._boundary is not None:
            self._boundary.take(done)
            now = time.monotonic()
            if self._last:
                self._paced = min(self._paced + 1, _PACE_STEPS)
                self._pace += (now - self._last - self._pace) / self._paced
            self._last = now
            self._mark()

    def report(self) -> list[float]:
        """Return numbers to add up over all ranks, of what each has registered itself."""
        return self._boundary.digest() if self._boundary is not None else []

    def learn(self, sums: Sequence[float]) -> None:
        """Take in the sums of report()."""
        if self._boundary is not None:
            self._boundary.compare(sums, self._world.size)

    def hold(self) -> None:
        """Stay for a moment where a peer is lost: the launcher may want what this process holds."""
        if self._listener is not None and self._asked.wait(_HOLD_SECONDS):
            self._over.wait(max(0.0, self._until - time.monotonic()))

    def _mark(self) -> None:
        assert self._boundary is not None
        files, seconds = self._snapshots.alone()
        why = self._boundary.why_not or ("" if files else "this rank sees no snapshot directory")
        if why and not self._said:
            self._said = True
            say(self._world.rank, f"steps since a snapshot are done again after a failure: {why}")
        if self._marks is not None:
            newest = self._snapshots.made
            step = self._boundary.step
            self._marks.write(Marks(step, newest, True, not why, self._pace, seconds))

    # --- The thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        while True:
            link, _ = self._listener.accept()
            with link, contextlib.suppress(OSError):
                self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        """Do as one request says; say how it went. Raises OSError when the launcher is gone."""
        order = _hear(link, time.monotonic() + _HOLD_SECONDS)
        self._until = time.monotonic() + float(order["seconds"])
        self._asked.set()
        try:
            self._obey(link, writes=order["do"] == "write")
        except Exception as error:  # whatever it is, the older snapshot counts
            _tell(link, no=str(error) or type(error).__name__)
        finally:
            self._over.set()

    def _obey(self, link: socket.socket, *, writes: bool) -> None:
        boundary, rank = self._boundary, self._world.rank
        assert boundary is not None
        with boundary.reading(self._until - time.monotonic()):
            captured, step = boundary.captured(rank), boundary.step
            _tell(link, step=step)
            files, _ = self._snapshots.alone()
            if not writes:
                _tell(link, word=word_of(step, captured))
                return
            if files is None:
                raise ChangedError("this rank sees no snapshot directory")
            word = word_of(step, captured)
            rescued = {"rank": rank, "newest": self._snapshots.newest}
            config = {**self._config(), **boundary.facts(), "rescued": rescued}

            def agreed() -> bool:
                # Only now: the other one hashes while this one writes.
                return _hear(link, self._until).get("word") == word

            accelerator = self._world.accelerator
            if not write_alone(files, rank, step, captured, config, accelerator, agreed):
                raise ChangedError("another survivor holds other bits")
            _tell(link, done=step)


def word_of(step: int, captured: Captured) -> str:
    """Return a hash of the whole state after a step, equal where all bits are."""
    flat = captured.flat
    hashes = hash_tensors(flat.tensors[name] for name in sorted(flat.tensors))
    text = json.dumps([flat.tree, flat.aliases], sort_keys=True)
    return f"{step} {int(hash_tensors([hashes])[0]):x} {zlib.crc32(text.encode()):x}"


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _tell(link: socket.socket, **facts: Any) -> None:
    link.sendall(json.dumps(facts).encode() + b"\n")


def _hear(link: socket.socket, until: float) -> dict[str, Any]:
    """Return the launcher's next line. Raises OSError where none comes in time."""
    line = b""
    while not line.endswith(b"\n"):
        link.settimeout(max(0.001, until - time.monotonic()))
        if not (part := link.recv(4096)):
            raise ConnectionError("the launcher is gone")
        line += part
    found: dict[str, Any] = json.loads(line)
    return found
