"""Finds state that counts on where no snapshot looks: in plain attributes.

Of an optimizer that is not torch's, of a scheduler that is neither torch's nor registered, of a
scheduler's functions, of the model's modules. Looked at after the first steps of each process: a
loop does the same in every one. And ever more seldom later, as what it does may begin late, or
come at an epoch's end only.
"""

from __future__ import annotations

import dis
import gc
import inspect
import random
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Updater
from ddpjob_trainer.state.codec import raw

_TWO = 2
_READS = ("LOAD_METHOD", "LOAD_CONST")
_DEPTH = 3
_SOME = 1024  # elements of a tensor that are looked at
_MOST = 64  # entries of a list or dict that are looked at
_Known = Callable[[object], bool]


class Hidden:
    """Looks once per step. ``known``: whether a snapshot holds an object; ``say`` warns.

    ``registered``: whether it is kept for itself, and not as a part of another.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        updater: Updater,
        known: _Known,
        say: Callable[[str], None],
        registered: _Known = lambda obj: False,
    ) -> None:
        self._module = module
        self._optimizers = [unit.optimizer for unit in updater.units]
        self._alone = [unit.optimizer for unit in updater.units if unit.scheduler is None]
        self._functions = [*_functions([unit.scheduler for unit in updater.units])]
        self._known = known
        self._registered = registered
        self._say = say
        self._told: set[str] = set()
        self._steps = 0
        self._marks: dict[str, Any] = {}
        self._begun = dict(self._module_flags())
        self._switched: dict[str, bool] = {}  # in the first step
        self._rates = self._now()
        self._schedulers: list[tuple[object, Any]] | None = None  # with their marks

    def step_ended(self) -> None:
        """Raise ConfigError for what would be lost; warn of what may be."""
        if self._alone and (rates := self._now()) != self._rates:
            self._rates = rates
            self._check_schedulers()
        self._steps += 1
        if self._steps <= _TWO:
            self._check_flags()
        if is_looked_after(self._steps):
            marks, self._marks = self._marks, dict(self._attributes())
            self._check(marks, self._marks)

    # --- Attributes of optimizers and of modules -------------------------------------------

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for optimizer in self._optimizers:
            kind = type(optimizer)
            own = kind.state_dict is not torch.optim.Optimizer.state_dict
            if own or kind.__module__.startswith("torch."):
                continue
            logged = {name for name in vars(optimizer) if _is_logged(kind, name)}
            for name, mark in self._marks_of(vars(optimizer), {"state", "param_groups"} | logged):
                yield f"optimizer {kind.__name__}.{name}", mark
            for name, inner in vars(optimizer).items():
                if isinstance(inner, torch.optim.Optimizer) and not self._is_kept(inner, optimizer):
                    yield f"optimizer {kind.__name__}.{name}.state", _states(inner)
        for function in self._functions:
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            for name, mark in self._marks_of({name: _content(cell) for name, cell in cells}):
                yield f"scheduler {name}", mark
        for path, part in self._module.named_modules():
            if type(part).__module__.startswith("torch.") or _keeps_more(part):
                continue
            for name, mark in self._marks_of(vars(part), _MODULES_OWN):
                yield f"{path}.{name}" if path else name, mark

    def _marks_of(
        self, values: Mapping[str, Any], besides: Container[str] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Those of what no snapshot holds: a dict or a generator may be registered."""
        return _marks({n: v for n, v in values.items() if not self._registered(v)}, besides)

    def _is_kept(self, inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
        shared = inner.state is outer.state
        return shared or any(inner is o for o in self._optimizers) or self._registered(inner)

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [n for n, mark in now.items() if before.get(n, mark) != mark]
        for name in changed:
            kind, _, what = name.partition(" ")
            if kind == "optimizer" and what.endswith(".state"):
                raise ConfigError(
                    f"{what} changes in each update, and the optimizer around it says nothing of it"
                    " in its state_dict(), so that no snapshot would hold it: keep it as well, with"
                    f" run.register('inner', optimizer.{what.split('.')[1]})"
                )
            if kind == "optimizer":
                raise ConfigError(
                    f"{what} changes in each update, but no snapshot"
                    " would hold it: an optimizer's state belongs into its self.state[parameter]"
                    " or its param_groups; or let it have a state_dict() and a load_state_dict() of"
                    " its own that hold what counts"
                )
            if kind == "scheduler":
                raise ConfigError(
                    f"a function that prepare(scheduler=...) calls changes {what!r} from step to"
                    " step, a variable that no snapshot holds: compute the rate from the number"
                    " that it is given, or make it an object with __call__(), whose attributes"
                    " torch's schedulers keep"
                )
        if names := self._untold(changed):
            self._say(
                f"warning: the model changes {names} in the loop, plain attributes that no snapshot"
                " holds: what is carried from step to step would begin anew after a resume. Make it"
                " a buffer with register_buffer(), of which rank 0's counts; what each rank has for"
                " itself belongs into a dict and run.register(name, dict, per_rank=True)"
            )

    def _untold(self, changed: list[str]) -> str:
        """Those not told of before, as a text."""
        changed = [name for name in changed if name not in self._told]
        self._told.update(changed)
        return ", ".join(map(repr, changed[:3])) + (", ..." if len(changed) > 3 else "")

    def _module_flags(self) -> Iterator[tuple[str, bool]]:
        """Those of the script's modules that hold parameters or buffers."""
        for path, part in self._module.named_modules():
            if type(part).__module__.startswith("torch.") or _keeps_more(part):
                continue
            for name, value in vars(part).items():
                if isinstance(value, bool) and name not in _MODULES_OWN and _holds_any(part):
                    yield (f"{path}.{name}" if path else name), value

    def _check_flags(self) -> None:
        """One that says that parameters have been set from the first batch, as an ActNorm has it.

        After a resume they would be set again, over what has been learned.
        """
        now, before = dict(self._module_flags()), self._switched
        self._switched = {
            n: flag for n, flag in now.items() if self._begun.get(n, flag) is not flag
        }
        # What is switched in every step is not done once.
        if names := self._untold([name for name in before if name in self._switched]):
            self._say(
                f"warning: the model switches {names} in the first step, plain attributes"
                " that no snapshot holds: what is done once, as setting parameters or a codebook"
                " from the first batch, would be done again after a resume, over what has been"
                " learned. Make it a buffer: register_buffer('done', torch.tensor(False))"
            )

    # --- Schedulers ------------------------------------------------------------------------

    def _now(self) -> list[Any]:
        return [_mark(g["lr"], 0) for optimizer in self._alone for g in optimizer.param_groups]

    def _check_schedulers(self) -> None:
        """Somebody has changed a learning rate that prepare() knows no scheduler for."""
        if self._schedulers is None:
            self._schedulers = [(obj, _own(obj)) for obj in _holders(self._alone)]
            return
        for obj, before in self._schedulers:
            if _own(obj) != before and not self._known(obj):
                raise ConfigError(
                    f"{type(obj).__name__} changes the learning rate in the loop, but no snapshot"
                    " would hold what it counts: keep it with run.register('scheduler', scheduler)"
                    " before run.steps(), for which it needs state_dict() and load_state_dict(), or"
                    " compute the rate from step.index"
                )


def is_early(step: int) -> bool:
    """Whether to look after this step, and the next: the first, the 4th, 8th, 16th and so on."""
    return step != _TWO and step & (step - 1) == 0


def is_looked_after(step: int) -> bool:
    """Whether state is looked at after this step, and held against what the last look saw."""
    return is_early(step) or is_early(step - 1)


def _is_logged(kind: type, name: str) -> bool:
    """Whether code of this kind of optimizer writes it as it goes, and none reads it.

    As the last norm for a log: it decides about nothing.
    """
    reads, writes = False, False
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for method, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(inspect.unwrap(function), "__code__", None)
            if isinstance(code, CodeType):
                used = {*_uses(code, name)}
                writes |= method != "__init__" and "STORE_ATTR" in used
                reads |= bool(used - {"STORE_ATTR", "DELETE_ATTR"})
    return writes and not reads


def _uses(code: CodeType, name: str) -> Iterator[str]:
    """By which instructions a name is used, functions within included."""
    for one in dis.get_instructions(code):
        # Not a variable of that name; a text may be given to getattr().
        if one.argval == name and ("ATTR" in one.opname or one.opname in _READS):
            yield one.opname
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _uses(one, name)


def _functions(schedulers: Iterable[Any]) -> Iterator[FunctionType]:
    """What they call, and those within them. Of other callables torch keeps the attributes."""
    for scheduler in schedulers:
        found = getattr(scheduler, "lr_lambdas", None)
        for function in found if isinstance(found, list) else ():
            if isinstance(function, FunctionType):
                yield function
        inner = getattr(scheduler, "_schedulers", None)
        yield from _functions(inner if isinstance(inner, list | tuple) else ())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _states(optimizer: torch.optim.Optimizer) -> Any:
    """A mark of what it keeps for its parameters."""
    found = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [[_mark(part, 1) for part in state.values()] for state in found[:_MOST]]


def _holders(optimizers: list[torch.optim.Optimizer]) -> Iterator[object]:
    """What has one of these as an attribute, and a step(), but no model: a scheduler."""
    owners: list[object] = []
    for optimizer in optimizers:
        for found in gc.get_referrers(optimizer):
            owners += gc.get_referrers(found) if isinstance(found, dict) else [found]
    for owner in {id(owner): owner for owner in owners}.values():
        own = getattr(owner, "__dict__", None)
        package = type(owner).__module__.partition(".")[0]
        if (
            isinstance(own, dict)
            and package not in ("torch", "ddpjob_trainer")
            and any(value is optimizer for value in own.values() for optimizer in optimizers)
            and callable(getattr(owner, "step", None))
            and not isinstance(owner, torch.nn.Module | torch.optim.Optimizer | type | ModuleType)
            and not any(isinstance(value, torch.nn.Module) for value in own.values())
        ):
            yield owner


def _own(obj: object) -> dict[str, Any]:
    return dict(_marks(vars(obj)))


# --- What a value is, to be compared with what it is later -----------------------------------

_MODULES_OWN = frozenset(vars(torch.nn.Module()))


def _keeps_more(module: torch.nn.Module) -> bool:
    """Whether a snapshot holds what it says itself."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _holds_any(module: torch.nn.Module) -> bool:
    """Whether it holds anything that could be set."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _marks(values: Mapping[str, Any], besides: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name not in besides and (mark := _mark(value, _DEPTH)) is not None:
            yield name, mark


def _mark(value: Any, depth: int) -> Any:
    """What tells a value from its later self; None for what is not taken for state.

    A tensor with a graph is none: it cannot be used in the next step.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return repr(value)  # NaN equals itself then
    if isinstance(value, torch.Tensor):
        if value.requires_grad or value.is_inference():
            return None
        return _Tensor(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if depth and isinstance(value, dict):
        return [(key(k), _mark(v, depth - 1)) for k, v in list(value.items())[:_MOST]]
    if depth and isinstance(value, list | tuple | deque):
        return [_mark(part, depth - 1) for part in list(value)[:_MOST]]
    return None


def key(value: Any) -> Any:
    """What tells a key of a dict: a parameter is itself, whatever its elements are by now."""
    return repr(value) if isinstance(value, str | int | float | bytes | None) else id(value)


class _Tensor:
    """Equal to another mark if that is of the same tensor, not changed since.

    It keeps none alive: long after, that may be all of a step's outputs.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._contents = contents(tensor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Tensor)
            and other._tensor() is self._tensor()
            and other._contents == self._contents
        )

    __hash__ = None  # type: ignore[assignment]


def contents(tensor: torch.Tensor) -> tuple[int, bytes]:
    """What tells that a tensor has been changed: its version, and some of its elements.

    ``tensor.data.mul_(0.9)``, as many write an average, leaves the version as it was.
    """
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_meta or not plain.numel():
        return tensor._version, b""
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    some = plain.reshape(-1)[:: -(-plain.numel() // _SOME)]
    return tensor._version, bytes(raw(some))
