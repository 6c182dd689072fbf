"""Finds what the loop trains with but no snapshot would hold.

Global hooks see every module and optimizer that is used. They slow every call down a little, so
they stay for the first steps of each process only: a loop uses the same objects at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.training_state import TrainingState

_STEPS = 2

_Marks = dict[str, tuple[int, int]]  # of a module's own buffers: identity and version


class Guard:
    """Watches one loop. Raises ConfigError from the use of an unknown object."""

    def __init__(self, state: TrainingState, known: list[object], *, modules: bool) -> None:
        self._known = {id(part) for obj in known for part in _parts(obj)}
        self._state = state
        self._registered = 0
        self._asleep = False
        self._buffers: dict[torch.nn.Module, _Marks] = {}
        self._left = _STEPS
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._optimizer_steps)]
        if modules:
            self._handles.append(register_module_forward_pre_hook(self._module_called))

    def step_ended(self) -> None:
        """One step less to watch."""
        if not self._handles:
            return
        self._check_buffers()
        self._left -= 1
        if not self._left:
            self.stop()

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buffers.clear()

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """While an evaluation runs: what only that uses changes nothing."""
        before, self._asleep = self._asleep, True
        try:
            yield
        finally:
            self._asleep = before

    def _is_known(self, obj: object) -> bool:
        kept = [*self._state.registered.values(), *self._state.per_rank.values()]
        if len(kept) != self._registered:  # register() inside the loop
            self._registered = len(kept)
            for value in kept:
                self._known.update(id(part) for part in _parts(value))
        return id(obj) in self._known

    def _module_called(self, module: torch.nn.Module, args: Any) -> None:
        if self._asleep or not (module._parameters or module._buffers) or self._is_known(module):
            return
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            raise ConfigError(
                f"{type(module).__name__} is used in the loop, but no snapshot would hold its"
                " parameters: make it a part of the model that prepare() gets, keep it with"
                " run.register(name, module), or freeze it with module.requires_grad_(False)"
            )
        if module not in self._buffers:
            self._buffers[module] = _marks(module)

    def _check_buffers(self) -> None:
        """A constant, as CrossEntropyLoss(weight=...) has one, needs no snapshot."""
        for module, marks in self._buffers.items():
            if _marks(module) != marks:
                raise ConfigError(
                    f"{type(module).__name__} changes its buffers in the loop, but no snapshot"
                    " would hold them: keep it with run.register(name, module), or freeze it"
                    " with module.eval()"
                )

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._asleep or self._is_known(optimizer):
            return
        raise ConfigError(
            f"{type(optimizer).__name__} is used in the loop, but no snapshot would hold its"
            " state: give it to prepare(), or keep it with run.register(name, optimizer)"
        )


def _marks(module: torch.nn.Module) -> _Marks:
    return {n: (id(b), b._version) for n, b in module._buffers.items() if b is not None}


def _parts(obj: object, deep: bool = True) -> Iterator[object]:
    """The object, its submodules, and the modules and optimizers that it holds as attributes."""
    yield obj
    if isinstance(obj, torch.nn.Module):
        yield from obj.modules()
    if deep:
        for value in getattr(obj, "__dict__", {}).values():
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                yield from _parts(value, deep=False)
