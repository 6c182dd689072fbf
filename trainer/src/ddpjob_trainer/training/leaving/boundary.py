"""Keep the newest step boundary, so that a survivor of a failure can save that step.

A boundary is where a step's body is over. The loop calls take() there, and before_update() where
parameters and optimizers change next. In between these are as the boundary left them, so the
rescue's thread reads them without a copy, in reading(). What a body may change before its update is
copied at each boundary: buffers, settings of optimizers, registered objects, modes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ddpjob_trainer.snapshot.save.layout import Captured
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.buffers import Backup
from ddpjob_trainer.state.codec import Exact, flatten, raw
from ddpjob_trainer.state.modes import Modes
from ddpjob_trainer.state.stateful import DictState, Stateful

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class ChangedError(Exception):
    """The state is that of no boundary any more, or cannot be kept."""


class Boundary:
    """The newest boundary of one process.

    ``own``: names of what prepare() has registered, which changes in updates only. ``best``: see
    run.keep_best(). ``step``: after how many steps it is, -1: none yet. ``why_not``: what of this
    run cannot be kept, "" for nothing.
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
        self._backups = [Backup(module) for module in (state.module, *modules)]
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
        self._versions: list[int] = []

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

    def before_update(self) -> None:
        """Wait until nobody reads; what is read is in flux from here to the next boundary."""
        if not self._updating:
            self._lock.acquire()
            self._updating = True

    def take(self, step: int) -> None:
        """Keep the state after this step, which the step's body may change no more."""
        self.before_update()  # a reader has the copies of the boundary before
        if not self.why_not:
            self._copy(step)
        self.step = step
        self._updating = False
        self._lock.release()

    def _copy(self, step: int) -> None:
        with torch.no_grad():
            for backup in self._backups:
                backup.take(step)
        for name, optimizer in self._optimizers.items():
            self._groups[name] = [_settings(group) for group in optimizer.param_groups]
        try:
            self._kept = {name: _copied(obj) for name, obj in self._objects.items()}
        except Exception as error:  # whatever user code raises is no reason to end training
            self.why_not = f"what is registered cannot be copied: {error}"
        self._flags = self._modes.now()
        self._best_then = dict(self._best())
        self._versions = [parameter._version for parameter in self._parameters]

    def digest(self) -> list[float]:
        """Return numbers whose sums over the ranks tell whether registered objects are equal."""
        if not self._objects:
            return []
        flat = flatten(self._kept)
        text = json.dumps([flat.tree, flat.aliases], sort_keys=True).encode()
        crc = zlib.crc32(text)
        for name in sorted(flat.tensors):
            crc = zlib.crc32(raw(flat.tensors[name]), crc)
        number = crc >> 12  # so that sums of squares are exact
        return [float(number), float(number * number)]

    def compare(self, sums: Sequence[float], ranks: int) -> None:
        """Take in the sums of digest(): rank 0's count, and it may be the one that dies."""
        if sums and sums[0] ** 2 != ranks * sums[1]:
            self.why_not = self.why_not or "registered objects differ from rank to rank"

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
        if self._versions != [parameter._version for parameter in self._parameters]:
            raise ChangedError("a forward or the body has changed a parameter before the update")
        kept = {name: self._optimizer(name) for name in self._optimizers} | self._kept
        found = self._state.capture(rank, kept)
        try:
            copies = {_place(now): was for one in self._backups for now, was in one.pairs()}
        except LookupError as error:
            raise ChangedError(f"the buffer {error} has got another shape since") from None
        tensors = {name: copies.get(_place(t), t) for name, t in found.flat.tensors.items()}
        return Captured(replace(found.flat, tensors=tensors), found.shared, {})

    def facts(self) -> dict[str, Any]:
        """Return what else a snapshot's configuration holds of the boundary."""
        return {"best": self._best_then, "modes": self._modes.changed(self._flags)}

    def _optimizer(self, name: str) -> Exact:
        state = self._optimizers[name].state_dict()
        groups = zip(state["param_groups"], self._groups[name], strict=True)
        state["param_groups"] = [{**group, **settings} for group, settings in groups]
        return Exact(state, tensors_only=True)


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
