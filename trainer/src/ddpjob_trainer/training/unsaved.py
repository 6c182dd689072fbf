"""Finds what the loop trains with but prepare() does not know: nobody would average or keep it.

Global hooks see every module, optimizer, scheduler, scaler and average that is used. That on
modules slows every call down a little, so it stays for the first steps of each process only: a loop
uses the same ones at every step. It comes back ever more seldom, as a teacher may join late.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Updater
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.stateful import kept_by
from ddpjob_trainer.training.enclosing import find_enclosing, warning
from ddpjob_trainer.training.hidden import Hidden, contents, is_early
from ddpjob_trainer.training.variables import Variables, frame_of_the_script, looking

_STEPS = 2

_Marks = dict[str, tuple[int, tuple[int, bytes]]]  # of a module's own tensors: identity, contents


class Guard:
    """Watches one loop. Raises ConfigError from the use of an unknown object.

    ``variables``: whether to look at the loop's own, too.
    """

    def __init__(
        self,
        state: TrainingState,
        updater: Updater,
        known: list[object],
        *,
        modules: bool,
        say: Callable[[str], None] = lambda text: None,
        variables: bool = False,
    ) -> None:
        optimizers = [unit.optimizer for unit in updater.units]
        self._prepared = {id(part) for optimizer in optimizers for part in _parts(optimizer)}
        self._known = self._prepared | {id(part) for obj in known for part in _parts(obj)}
        self._updater = updater
        self._trained = {id(parameter) for parameter in state.module.parameters()}
        self._state = state
        self._registered = 0
        self._asleep = False
        self._frozen: weakref.WeakKeyDictionary[torch.nn.Module, _Marks] = (
            weakref.WeakKeyDictionary()
        )
        self._left = _STEPS
        self._optimizers: Any = register_optimizer_step_pre_hook(self._optimizer_steps)
        self._methods = contextlib.ExitStack()
        self._schedulers = {id(unit.scheduler) for unit in updater.units if unit.scheduler}
        self._inside = False  # of a method that is watched
        for kind in _with_subclasses(LRScheduler):
            self._watch(kind, "step", self._scheduler_steps)
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, in the loop
        self._watch_new_optimizers()
        self._watch(AveragedModel, "update_parameters", self._averages)
        self._watch(torch.amp.GradScaler, "scale", self._scales)
        self._say = say
        self._hidden = Hidden(state.module, updater, self.knows, say, self._is_registered)
        self._variables = Variables(self._kept, self._hooks, say) if variables else None
        self._modules: Any = None
        self._looks_at_modules = modules
        self._steps = 0
        self._watch_modules()

    def step_ended(self) -> None:
        """One step less to watch modules in."""
        self._hidden.step_ended()
        if self._variables is not None:
            self._variables.step_ended()
            if not self._steps:
                self._tell_of_loops()
        self._steps += 1
        if self._left:
            self._check_frozen()
            self._check_registered()
            self._left -= 1
            if not self._left:
                self._stop_modules()
        elif is_early(self._steps):
            self._left = _STEPS
            self._watch_modules()

    def _tell_of_loops(self) -> None:
        line = None
        with looking():
            line = find_enclosing(frame_of_the_script())
        if line is not None:
            self._say(warning(line))

    def stop(self) -> None:
        """Watch no longer."""
        self._left = 0
        self._optimizers.remove()
        self._methods.close()
        self._stop_modules()

    def _watch_modules(self) -> None:
        if self._looks_at_modules:
            self._modules = register_module_forward_pre_hook(self._module_called)

    def _stop_modules(self) -> None:
        if self._modules is not None:
            self._modules.remove()
            self._modules = None

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """While an evaluation runs: what only that uses changes nothing."""
        before, self._asleep = self._asleep, True
        try:
            yield
        finally:
            self._asleep = before

    def knows(self, obj: object) -> bool:
        """Whether it is prepared or registered, or a part of what is."""
        kept = [*self._state.registered.values(), *self._state.per_rank.values()]
        if len(kept) != self._registered:  # the loop itself registers its stream
            self._registered = len(kept)
            for value in kept:
                self._known.update(id(part) for part in _parts(value))
        return id(obj) in self._known

    def _is_registered(self, obj: object) -> bool:
        kept = (*self._state.registered.values(), *self._state.per_rank.values())
        return any(obj is kept_by(value) for value in kept)

    def _kept(self) -> Iterator[object]:
        yield self._state.module
        for unit in self._updater.units:
            yield unit.scheduler
            yield from (getattr(unit.optimizer, name, None) for name in ("param_groups", "state"))
        for value in (*self._state.registered.values(), *self._state.per_rank.values()):
            yield kept_by(value)

    def _hooks(self) -> Iterator[object]:
        """What each update calls of the script's."""
        yield from (hook for hook, _ in self._updater.hooks)
        for unit in self._updater.units:
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                yield from getattr(unit.optimizer, name, {}).values()

    def _module_called(self, module: torch.nn.Module, args: Any) -> None:
        if self._asleep or not (module._parameters or module._buffers) or self.knows(module):
            return
        early = self._steps < _STEPS or torch.is_grad_enabled()  # later, only a metric may be
        if early and any(p is not None and p.requires_grad for p in module._parameters.values()):
            raise ConfigError(
                f"{type(module).__name__} is used in the loop, but prepare() does not know it: its"
                " gradients would not be averaged, and no snapshot would hold its parameters. Make"
                " it a part of the model, train it with"
                " run.prepare([model, other], [optimizer, other_optimizer]), or freeze it with"
                " other.requires_grad_(False); one that learns without gradients, as an average"
                " does, is frozen and kept with run.register(name, other)"
            )
        if module not in self._frozen:
            self._frozen[module] = _marks(module)

    def _check_frozen(self) -> None:
        """A constant, as CrossEntropyLoss(weight=...) has one, needs no snapshot."""
        for module, marks in self._frozen.items():
            now = _marks(module)
            changed = next((name for name in now if now[name] != marks.get(name)), None)
            if changed is not None:
                what = "buffers" if changed in module._buffers else "parameters"
                raise ConfigError(
                    f"{type(module).__name__} changes its {what} in the loop, but no snapshot"
                    " would hold them: keep it with run.register(name, module), or leave it as it"
                    " is, with module.eval()"
                )

    def _check_registered(self) -> None:
        """What is only registered is kept, but nobody averages its gradients."""
        for name, value in self._state.registered.items():
            if isinstance(value, torch.optim.Optimizer):
                continue
            for part in _parts(value):
                if isinstance(part, torch.nn.Module) and any(
                    p is not None and p.grad is not None and id(p) not in self._trained
                    for p in part._parameters.values()
                ):
                    raise ConfigError(
                        f"{name!r}, which run.register() keeps, gets gradients, and nobody averages"
                        " them over the ranks: train it with"
                        " run.prepare([model, other], [optimizer, other_optimizer]), or freeze it"
                        " with requires_grad_(False)"
                    )

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # What is registered for each rank is each rank's own affair.
        own = any(optimizer is value for value in self._state.per_rank.values())
        if self._asleep or own or self._updater.applying:
            return
        if optimizer in self._made:  # of something else than the model, for an attack on it, say
            return
        name = type(optimizer).__name__
        if id(optimizer) in self._prepared:
            raise ConfigError(
                f"{name}.step() is called in the loop, on gradients that are not averaged over the"
                " ranks: call step.backward(loss) and step.update(optimizer), or step.commit()"
                " alone, which update with it"
            )
        raise ConfigError(
            f"{name} is used in the loop, but prepare() does not know it: the gradients that it"
            " applies are not averaged over the ranks, and no snapshot would hold its state. Train"
            " with several as in run.prepare(model, [first, second]) or"
            " run.prepare([model, other], [optimizer, other_optimizer])"
        )

    def _watch_new_optimizers(self) -> None:
        init: Any = torch.optim.Optimizer.__init__

        @functools.wraps(init)
        def watched(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            if not (self._asleep or self._updater.applying):
                self._optimizer_made(optimizer)

        setattr(torch.optim.Optimizer, "__init__", watched)  # noqa: B010
        self._methods.callback(setattr, torch.optim.Optimizer, "__init__", init)

    def _optimizer_made(self, optimizer: Any) -> None:
        if any(id(p) in self._trained for group in optimizer.param_groups for p in group["params"]):
            name = type(optimizer).__name__
            raise ConfigError(
                f"{name} is made in the loop for parameters of the model: nobody would update with"
                " it, as step.commit() goes on with what prepare() was given. Make all optimizers"
                " before, as in run.prepare(model, [first, second]) with the same parameters, and"
                " choose with step.update(first); or change the param_groups of the one there is"
            )
        self._made.add(optimizer)

    def _watch(self, kind: Any, name: str, look: Callable[[Any], None]) -> None:
        """Call ``look`` before each call of a method that this very class defines.

        For what has no hooks. What the method calls in turn, as a scheduler of schedulers does, is
        its own affair.
        """
        method = vars(kind).get(name)
        if method is None:
            return

        @functools.wraps(method)
        def watched(obj: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self._asleep or self._updater.applying:
                return method(obj, *args, **kwargs)
            look(obj)
            self._inside = True
            try:
                return method(obj, *args, **kwargs)
            finally:
                self._inside = False

        setattr(kind, name, watched)
        self._methods.callback(setattr, kind, name, method)

    def _scheduler_steps(self, scheduler: Any) -> None:
        if getattr(scheduler, "_is_initial", False):  # it is just being made
            return
        name = type(scheduler).__name__
        if id(scheduler) in self._schedulers:
            raise ConfigError(
                f"{name}.step() is called in the loop, but commit() advances the scheduler that"
                " prepare() was given: leave the call out, or keep the scheduler with"
                " run.register('scheduler', scheduler) in place of prepare(scheduler=...)"
            )
        if id(getattr(scheduler, "optimizer", None)) in self._prepared:
            self._must_be_kept(scheduler, "step()", "'scheduler', scheduler")

    def _scales(self, scaler: Any) -> None:
        if not scaler.is_enabled() or (scaler is not self._updater.scaler and self.knows(scaler)):
            return
        raise ConfigError(
            "GradScaler.scale() is called in the loop, but step.backward() scales the loss itself"
            " where start(precision='fp16') asks for it, and nothing would undo the script's own"
            " factor: give step.backward() the plain loss, and the scaler to"
            " run.prepare(..., grad_scaler=scaler)"
        )

    def _averages(self, average: Any) -> None:
        self._must_be_kept(average, "update_parameters()", "'average', average")

    def _must_be_kept(self, obj: object, call: str, words: str) -> None:
        if not self.knows(obj):
            raise ConfigError(
                f"{type(obj).__name__}.{call} is called in the loop, but no snapshot would hold"
                f" what it counts: keep it with run.register({words}) before run.steps()"
            )


def _with_subclasses(kind: Any) -> Iterator[Any]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def _marks(module: torch.nn.Module) -> _Marks:
    own = {**module._parameters, **module._buffers}
    return {
        name: (id(tensor), contents(tensor)) for name, tensor in own.items() if tensor is not None
    }


def _parts(obj: object, deep: bool = True) -> Iterator[object]:
    """The object, its submodules, and the modules and optimizers that it holds as attributes."""
    yield obj
    if isinstance(obj, torch.nn.Module):
        yield from obj.modules()
    if deep:
        for value in getattr(obj, "__dict__", {}).values():
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer | LRScheduler):
                yield from _parts(value, deep=False)
