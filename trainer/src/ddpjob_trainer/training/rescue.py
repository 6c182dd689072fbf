"""Save the newest step at the launcher's word, before this survivor of a failure is ended.

A thread listens, for the main one may wait in a collective for a peer that is gone. The launcher
asks one survivor to write an ordinary snapshot of its newest boundary, and another one to vouch: to
hash its own. Only where both hold the same bits does the snapshot get its manifest, as one flipped
bit would become everybody's. CPU only; environment.RESCUE=0 switches it off.

Rank 0's own work after commit() (files, logs) is never left out: a step in whose body it died is
left under way, and the older snapshot counts. Nobody can know it of a pod that is lost: then, and
on other ranks, such work of the last step is not done again.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ddpjob_trainer import trace
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.gradients.replica_check import hash_tensors
from ddpjob_trainer.liveness.marks import HOLD_SECONDS, Marks, MarksWriter, socket_path
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.save.alone import write_alone
from ddpjob_trainer.snapshot.save.layout import Captured
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import Exact, flatten, raw
from ddpjob_trainer.state.stateful import BufferBackup, DictState, Modes, Stateful

# --- The newest step boundary ---------------------------------------------------------------------
# A boundary is where a step's body is over. The loop calls take() there, and wait_for_readers() as
# parameters and optimizers change next. In between these are as the boundary left them, so the
# rescue's thread reads them without a copy, in reading(). What a body may change before its update
# is copied at each boundary: buffers, settings of optimizers, registered objects, modes.

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class ChangedError(Exception):
    """The state is that of no boundary any more, or cannot be kept."""


class Boundary:
    """The newest boundary of one process.

    ``own``: names of what prepare() has registered, which changes in updates only. ``best``: see
    run.keep_best(). ``step``: after how many steps it is, -1: none yet. ``why_not``: what of this
    run cannot be kept, "" for nothing. ``keeps_whole``: a step has several updates, between which
    nobody holds a boundary: all of it is copied.
    """

    def __init__(
        self,
        state: TrainingState,
        own: Collection[str],
        modes: Modes,
        best: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.step = -1
        self._state, self._modes, self._best = state, modes, best
        others = {name: obj for name, obj in state.registered.items() if name not in own}
        modules = [one for one in others.values() if isinstance(one, torch.nn.Module)]
        self._backups = [BufferBackup(module) for module in (state.module, *modules)]
        self._parameters = [p for one in (state.module, *modules) for p in one.parameters()]
        self._objects = {n: o for n, o in others.items() if not isinstance(o, torch.nn.Module)}
        self._optimizers = {
            name: obj
            for name, obj in state.registered.items()
            if name in own and isinstance(obj, torch.optim.Optimizer)
        }
        self.why_not = self._refusal()
        self._lock = threading.Lock()  # of parameters and optimizers: an update's, or a reader's
        self._updating = False  # this process's loop has the lock
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._kept: dict[str, Any] = {}
        self._flags: Sequence[Sequence[bool]] = ()
        self._best_then: dict[str, Any] = {}
        self._best_is_new = False
        self.keeps_whole = False
        self._whole: Captured | None = None
        self._versions: list[Any] = []

    def _refusal(self) -> str:
        if self._state.per_rank:
            return f"only each rank has its own {min(self._state.per_rank)!r}"
        if any(isinstance(one, torch.optim.Optimizer) for one in self._objects.values()):
            return "the loop steps an optimizer that prepare() was not given"
        usual = torch.nn.Module.get_extra_state
        if any(type(part).get_extra_state is not usual for part in self._state.module.modules()):
            return "a module keeps more state, in get_extra_state()"
        return ""

    # --- For the training thread ------------------------------------------------------------

    def wait_for_readers(self) -> None:
        """Wait until nobody reads; what is read is in flux from here to the next boundary."""
        if self._whole is None:
            self._begin_to_change()

    def _begin_to_change(self) -> None:
        if not self._updating:
            self._lock.acquire()
            self._updating = True

    def take(self, step: int) -> None:
        """Keep the state after this step, which the step's body may change no more."""
        self._begin_to_change()  # a reader has the copies of the boundary before
        self._whole = None
        try:
            if not self.why_not:
                self._copy(step)
            self.step = step
            if self.keeps_whole and not self.why_not:
                found = self.captured(0)
                tensors = {name: t.detach().clone() for name, t in found.flat.tensors.items()}
                self._whole = Captured(replace(found.flat, tensors=tensors), found.shared, {})
        except Exception as error:  # no memory, or user code: no reason to end training
            self.why_not = f"the state cannot be copied: {error}"
        self.step, self._updating = step, False
        self._lock.release()

    def _copy(self, step: int) -> None:
        with torch.no_grad():
            for backup in self._backups:
                backup.take(step)
        for name, optimizer in self._optimizers.items():
            self._groups[name] = [_settings(group) for group in optimizer.param_groups]
        self._kept = {name: _copied(obj) for name, obj in self._objects.items()}
        self._flags = self._modes.now()
        before, self._best_then = self._best_then, dict(self._best())
        self._best_is_new = self.step >= 0 and self._best_then != before
        self._versions = self._now()

    def digest(self) -> list[float]:
        """Return numbers whose sums over the ranks tell whether what bodies change is equal."""
        flat = flatten(self._kept)
        text = json.dumps([flat.tree, flat.aliases], sort_keys=True).encode()
        crc = zlib.crc32(text)
        for name in sorted(flat.tensors):
            crc = zlib.crc32(raw(flat.tensors[name]), crc)
        for buffer in (one for backup in self._backups for one in backup.copies):
            crc = zlib.crc32(raw(buffer), crc)
        number = crc >> 12  # so that sums of squares are exact
        return [float(number), float(number * number)]

    def compare(self, sums: Sequence[float], ranks: int) -> None:
        """Take in the sums of digest(): rank 0's count, and it may be the one that dies."""
        total, squares = sums
        if not _are_equal(total, squares, ranks):
            differ = "registered objects, or buffers after commit(), differ from rank to rank"
            self.why_not = self.why_not or differ

    # --- For the rescue's thread --------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, seconds: float) -> Iterator[None]:
        """Keep updates away. Raises ChangedError where one does not end in so many seconds."""
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise ChangedError("an update, or the body after it, does not end")
        try:
            yield
        finally:
            self._lock.release()

    def captured(self, rank: int) -> Captured:
        """Return the whole state of the boundary but for generators, which follow from the step.

        Raises ChangedError where the body has changed what only updates change.
        """
        if self.step < 0 or self.why_not:
            raise ChangedError(self.why_not or "no step has ended")
        if self._whole is not None:
            return self._whole
        if not self.unchanged():
            what = "a parameter or an optimizer's state before the update"
            raise ChangedError(f"a forward or the body has changed {what}")
        kept = {name: self._optimizer(name) for name in self._optimizers} | self._kept
        found = self._state.capture(rank, kept)
        try:
            copies = {_place(now): was for one in self._backups for now, was in one.pairs()}
        except LookupError as error:
            raise ChangedError(f"the buffer {error} has got another shape since") from None
        tensors = {name: copies.get(_place(t), t) for name, t in found.flat.tensors.items()}
        return Captured(replace(found.flat, tensors=tensors), found.shared, {})

    def unchanged(self) -> bool:
        """Return whether no body has changed what only updates do, as it may during a write."""
        return self._whole is not None or self._versions == self._now()

    def _now(self) -> list[Any]:
        """Return what changes with parameters and states of optimizers; 0.1 ms for 200 tensors."""
        states = (state for one in self._optimizers.values() for state in one.state.values())
        values = (value for state in states for value in state.values())
        found = [(id(value), getattr(value, "_version", 0)) for value in values]
        return [*found, *((p.data_ptr(), p._version) for p in self._parameters)]

    def facts(self, rank: int) -> dict[str, Any]:
        """Return what else a snapshot's configuration holds of the boundary.

        Raises ChangedError where it would name a file that rank 0, who writes it, may not have.
        """
        if self._best_is_new and rank:
            raise ChangedError("rank 0 may not have saved what keep_best() found in this step")
        return {"best": self._best_then, "modes": self._modes.changed(self._flags)}

    def _optimizer(self, name: str) -> Exact:
        state = self._optimizers[name].state_dict()
        groups = zip(state["param_groups"], self._groups[name], strict=True)
        state["param_groups"] = [{**group, **settings} for group, settings in groups]
        return Exact(state, tensors_only=True)


def _are_equal(total: float, squares: float, ranks: int) -> bool:
    return total * total == ranks * squares


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _copied(obj: Stateful) -> Any:
    """Return what state_of() does, as it is now."""
    return Exact(copy.deepcopy(obj.state_dict()), tensors_only=not isinstance(obj, DictState))


def _place(tensor: torch.Tensor) -> _Place:
    """Tell tensors in memory from one another: a state_dict() has other objects for them."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


# --- The rescue -----------------------------------------------------------------------------------

_PACE_STEPS = 20  # whose mean is the time of a step
_HASH_SHARE = 0.01  # of all steps, at most, for hashes that only a single survivor needs


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
        self._said: set[str] = set()
        self._hashed = self._vouched = -1  # step of the hash sent last; of one equal on both ranks
        self._hash_due = 0  # step of the next one, the same on both ranks
        self._last, self._paced, self._pace = 0.0, 0, 0.0  # of steps: the end, how many, seconds

    # --- For the training thread ------------------------------------------------------------

    def begin(self, boundary: Boundary, config: Callable[[], Mapping[str, Any]], done: int) -> None:
        """Begin to listen, ``done`` steps having ended.

        ``config``: of a snapshot; raises ChangedError where it could not say all.
        """
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

    def wait_for_readers(self) -> None:
        """Keep the parameters from who reads them, and who reads them from an update."""
        if self._boundary is not None:
            self._boundary.wait_for_readers()
            if self._marks is not None:
                self._marks.in_flux()

    def several_updates(self) -> None:
        """Keep a copy of each boundary from the next one on: a step has had an update() amid it."""
        if self._boundary is not None:
            self._boundary.keeps_whole = True

    def evaluates(self) -> None:
        """Say once that a failure in such an evaluation cannot be rescued."""
        if self._world.rank == 0:
            self._say(
                "a failure within run.evaluate() after step.commit() repeats the steps since the"
                " newest snapshot: call run.evaluate() first in the loop's body, before its update"
            )

    def _say(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            say(self._world.rank, note)

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
        if self._boundary is None:
            return []
        return [*self._boundary.digest(), *self._hash()]

    def _hash(self) -> list[float]:
        """Return numbers by which the ranks vouch for each other, as long as they live.

        And, each in its place: after how many steps a hash costs this rank its share.
        """
        waits = [0.0] * self._world.size
        number, boundary, begun = 0, self._boundary, time.perf_counter()
        assert boundary is not None
        if not self._paced or boundary.step < self._hash_due:
            return [0.0, 0.0, *waits]
        with contextlib.suppress(ChangedError):
            word = word_of(boundary.step, boundary.captured(self._world.rank))
            number = zlib.crc32(word.encode()) >> 12 | 1  # so that sums of squares are exact
        self._hashed = boundary.step
        waits[self._world.rank] = (time.perf_counter() - begun) / (_HASH_SHARE * self._pace)
        return [float(number), float(number * number), *waits]

    def receive(self, sums: Sequence[float]) -> None:
        """Take in the sums of report()."""
        if self._boundary is None:
            return
        ranks = self._world.size
        self._boundary.compare(sums[:2], ranks)
        total, squares, *waits = sums[2:]
        if wait := max(waits):
            self._hash_due = self._hashed + math.ceil(wait)
        if total and _are_equal(total, squares, ranks):
            self._vouched = self._hashed
            self._mark()

    def hold(self) -> None:
        """Stay for a moment where a peer is lost: the launcher may want what this process holds."""
        if self._listener is None:
            return
        trace.mark("held")
        if self._asked.wait(HOLD_SECONDS):
            self._over.wait(max(0.0, self._until - time.monotonic()))

    def _mark(self) -> None:
        assert self._boundary is not None
        files, seconds = self._snapshots.alone()
        why = self._boundary.why_not or ("" if files else "this rank sees no snapshot directory")
        if why:
            self._say(f"steps since a snapshot are done again after a failure: {why}")
        if self._marks is not None:
            newest = self._snapshots.made
            step = self._boundary.step
            vouched = self._vouched == step - 1
            self._marks.write(Marks(step, newest, True, not why, self._pace, seconds, vouched))

    # --- The thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        while True:
            link, _ = self._listener.accept()
            with link, link.makefile("rb") as lines, contextlib.suppress(OSError):
                self._answer(link, lines)

    def _answer(self, link: socket.socket, lines: BinaryIO) -> None:
        """Do as one request says; say how it went. Raises OSError when the launcher is gone."""
        order = _hear(link, lines, time.monotonic() + HOLD_SECONDS)
        self._until = time.monotonic() + float(order["seconds"])
        self._asked.set()
        try:
            self._obey(link, lines, order["do"], order.get("most"))
        except Exception as error:  # whatever it is, the older snapshot counts
            _tell(link, no=str(error) or type(error).__name__)
        finally:
            self._over.set()

    def _obey(self, link: socket.socket, lines: BinaryIO, what: str, most: int | None) -> None:
        boundary, rank = self._boundary, self._world.rank
        assert boundary is not None
        with boundary.reading(self._until - time.monotonic()):
            config = self._config()
            captured, step = boundary.captured(rank), boundary.step
            if most is not None and step > most:
                raise ChangedError("rank 0 had more to do after the step's commit()")
            _tell(link, step=step)
            word = word_of(step, captured)
            if what == "vouch":
                _tell(link, word=word)
                return
            files, _ = self._snapshots.alone()
            if files is None:
                raise ChangedError("this rank sees no snapshot directory")
            rescued = {"rank": rank, "newest": self._snapshots.newest}
            config = {**config, **boundary.facts(rank), "rescued": rescued}

            def agreed() -> bool:
                # Only now: the other one hashes while this one writes.
                others = "none" if what == "alone" else _hear(link, lines, self._until)["word"]
                if others == "none":  # nobody is left: what all held a step before must do
                    return self._vouched == step - 1 and boundary.unchanged()
                return others == word and boundary.unchanged()

            accelerator = self._world.accelerator
            if not write_alone(files, rank, step, captured, config, accelerator, agreed):
                raise ChangedError("no other rank holds the same bits")
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


def _hear(link: socket.socket, lines: BinaryIO, until: float) -> dict[str, Any]:
    """Return the launcher's next line. Raises OSError where none comes in time."""
    link.settimeout(max(0.001, until - time.monotonic()))
    line = lines.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the launcher is gone")
    found: dict[str, Any] = json.loads(line)
    return found
