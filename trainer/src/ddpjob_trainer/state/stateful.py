"""Define what a snapshot asks of an object, and prepare optimizers for their return."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, cast

import numpy as np
import torch

from ddpjob_trainer.data.generators import state_of
from ddpjob_trainer.errors import ConfigError

# --- Buffers --------------------------------------------------------------------------------------
# Those of the state_dict count always. One that is not persistent counts while it has the shape
# that it had at prepare(); else it is a cache, as long as what a rank has seen, and each rank's
# own.


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Where a buffer is: forward may put another tensor there."""

    name: str
    module: torch.nn.Module
    key: str

    @property
    def is_persistent(self) -> bool:
        """Tell whether the state_dict holds it."""
        return self.key not in self.module._non_persistent_buffers_set

    def get(self) -> torch.Tensor | None:
        """Return what is there now."""
        return self.module._buffers[self.key]


def buffer_slots(module: torch.nn.Module) -> list[BufferSlot]:
    """Return every buffer's place, once."""
    return [
        BufferSlot(f"{prefix}.{key}" if prefix else key, part, key)
        for prefix, part in module.named_modules()
        for key in part._buffers
    ]


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers under their names, those that are there."""
    for place in buffer_slots(module):
        buffer = place.get()
        if buffer is not None and place.is_persistent:
            yield place.name, buffer


class SteadyBuffers:
    """The buffers outside of a model's state_dict, as tensors on which all ranks agree.

    Where one has another shape by now, the tensor that was there first takes its place.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        known = {id(buffer) for _, buffer in persistent_buffers(module)}
        self._first = {
            place: buffer
            for place, buffer in _strided({p: p.get() for p in buffer_slots(module)}).items()
            if not place.is_persistent and id(buffer) not in known
        }

    def tensors(self) -> list[torch.Tensor]:
        """Return those of now, in the same order on every rank."""
        return [
            now if (now := place.get()) is not None and _is_alike(now, first) else first
            for place, first in self._first.items()
        ]


class BufferBackup:
    """What the buffers held before a step's first forward.

    All are copied, as BatchNorm's kernel changes its statistics without telling anybody: a
    tensor's version stays what it was. DDP sends as much over the network in each step.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = buffer_slots(module)
        self._step = -1
        self._buffers: dict[BufferSlot, torch.Tensor | None] = {}
        self.copies: list[torch.Tensor] = []  # what they held, in the modules' order

    def take(self, step: int) -> None:
        """Remember what they hold now, once per step."""
        if step == self._step:
            return
        before, self._buffers = _strided(self._buffers), {p: p.get() for p in self._places}
        self._step = step
        buffers = list(_strided(self._buffers).values())
        if list(map(id, buffers)) != list(map(id, before.values())):  # == would compare elements
            self.copies = [torch.empty_like(buffer) for buffer in buffers]
        if self.copies:
            torch._foreach_copy_(self.copies, buffers)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that is there now with what its place held.

        Raises LookupError where one has come, gone or got another shape since.
        """
        copies = dict(zip(_strided(self._buffers), self.copies, strict=True))
        for place, buffer in self._buffers.items():
            now = place.get()
            if now is None and buffer is None:
                continue
            if now is None or place not in copies or not _is_alike(now, copies[place]):
                raise LookupError(place.name)
            yield now, copies[place]

    def put_back(self) -> None:
        """Undo all changes since, but of caches that have another shape by now."""
        for place, buffer in self._buffers.items():
            now = place.get()
            kept = buffer is not None and now is not None and _is_alike(now, buffer)
            if kept or place.is_persistent:
                place.module._buffers[place.key] = buffer
        if self.copies:
            # .data: a graph that waits for its backward checks the version of what it has saved.
            buffers = [buffer.data for buffer in _strided(self._buffers).values()]
            torch._foreach_copy_(buffers, self.copies)


@contextmanager
def preserved_buffers(module: torch.nn.Module, wanted: bool = True) -> Iterator[None]:
    """Leave the buffers as they were found, for evaluation; if not ``wanted``, as they become."""
    if not wanted:
        yield
        return
    backup = BufferBackup(module)
    with torch.no_grad():
        backup.take(0)
    try:
        yield
    finally:
        with torch.no_grad():
            backup.put_back()


def _strided(found: Mapping[BufferSlot, torch.Tensor | None]) -> dict[BufferSlot, torch.Tensor]:
    """Return what is there, but sparse ones, which cannot be sent or copied into."""
    return {p: b for p, b in found.items() if b is not None and b.layout is torch.strided}


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


# --- Objects with a state -------------------------------------------------------------------------


class Stateful(Protocol):
    """Anything with state_dict and load_state_dict: optimizers, schedulers, EMA, your own."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings, in lists, tuples and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take back what state_dict() returned."""
        ...


#: numpy's and Python's, which have a state, but no state_dict().
OtherGenerator = np.random.Generator | np.random.RandomState | random.Random
#: What register() takes.
Keepable = Stateful | torch.Generator | OtherGenerator | dict[Any, Any]


class GeneratorState:
    """A generator of torch's, of any device, of numpy's or of Python's as something Stateful."""

    def __init__(self, generator: torch.Generator | OtherGenerator) -> None:
        self.of = generator

    def state_dict(self) -> dict[str, Any]:
        """Return its state: torch's as bytes on the CPU, others in numbers and strings."""
        return {"state": _plain(state_of(self.of))}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Put it back."""
        of, value = self.of, state["state"]
        if isinstance(of, np.random.Generator):
            of.bit_generator.state = value
        elif isinstance(of, torch.Generator | np.random.RandomState):
            try:
                of.set_state(value)
            except RuntimeError as error:  # torch's, by the size
                raise ValueError(f"a generator was of another kind then: {error}") from error
        else:
            of.setstate(value)


def _plain(value: Any) -> Any:
    """Turn arrays into lists: words of 64 bits without a sign are no tensor's."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


class DictState:
    """A dict of the script's own as something Stateful. It stays the same object."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.of = values

    def state_dict(self) -> dict[str, Any]:
        """Return what is in it."""
        return {"values": self.of}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Put it back in the same dict."""
        values, mine = _on_devices(self.of, dict(state["values"])), self.of
        mine.clear()
        mine.update(values)


def _on_devices(there: Any, value: Any) -> Any:
    """Bring tensors to the devices of those in their places. Snapshots are read on the CPU."""
    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
        return value.to(there.device)
    if type(value) is not type(there):
        return value
    if isinstance(value, dict):
        for key in value.keys() & there.keys():
            value[key] = _on_devices(there[key], value[key])
    elif isinstance(value, list | deque):
        for place, (old, new) in enumerate(zip(there, list(value), strict=False)):
            value[place] = _on_devices(old, new)
    elif type(value) is tuple and len(value) == len(there):
        return tuple(map(_on_devices, there, value))
    return value


def stateful(obj: Keepable) -> Stateful:
    """Return the object that represents this in the snapshots."""
    if isinstance(obj, torch.Generator | OtherGenerator) and not isinstance(
        obj, random.SystemRandom
    ):
        return GeneratorState(obj)
    if isinstance(obj, dict) and not hasattr(obj, "state_dict"):
        return DictState(obj)
    return cast("Stateful", obj)


def give(obj: Stateful, state: Any) -> None:
    """Let an object take its state back."""
    if isinstance(obj, torch.optim.Optimizer):
        _give_optimizer(obj, state)
    else:
        obj.load_state_dict(state)


def _give_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load an optimizer's state into the groups and the state that it has.

    torch puts others in their place. A loop that changes ``group["lr"]`` of a group that it holds,
    or an optimizer within another that shares them, would go on with those of before. Where the one
    loads the other, what was one group is one again.
    """
    members, states = [*optimizer.param_groups], optimizer.state
    within = [(one, one.param_groups is optimizer.param_groups) for one in _within(optimizer)]
    numbers = {id(group): number for number, group in enumerate(members)}
    shared = [
        (one, place, numbers[id(group)])
        for one, _ in within
        for place, group in enumerate(one.param_groups)
        if id(group) in numbers
    ]
    optimizer.load_state_dict(state)
    loaded = [*optimizer.param_groups]
    for one, place, number in shared:
        if loaded[number] is members[number]:  # only the inner one was given what is stored
            loaded[number] = one.param_groups[place]
    for group, found in zip(members, loaded, strict=True):
        if group is not found:
            own = dict(group)
            group.clear()
            group.update({name: _filled(own.get(name), value) for name, value in found.items()})
    optimizer.param_groups[:] = members
    for one, place, number in shared:
        one.param_groups[place] = members[number]
    for one, same in within:
        if same:
            one.param_groups = optimizer.param_groups
    with contextlib.suppress(AttributeError):  # some show that of the one within, by a property
        if (fresh := optimizer.state) is not states:
            optimizer.state = states
            states.clear()
            states.update(fresh)
    _lay_out_like_parameters(optimizer)


def _within(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are its attributes, alone or in a list."""
    found: list[Any] = []
    for value in vars(optimizer).values():
        found += value if isinstance(value, list | tuple) else [value]
    return [one for one in found if isinstance(one, torch.optim.Optimizer) and one is not optimizer]


def _filled(own: Any, value: Any) -> Any:
    """Fill the tensor of a group's setting: a loop or another group may hold it."""
    both = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
    if not both or (own.shape, own.dtype) != (value.shape, value.dtype):
        return value
    with torch.no_grad():
        return own.copy_(value)


def _lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give tensors their parameters' strides, which fused kernels expect; snapshots drop them."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if like.stride() != value.stride():
                    state[name] = like.copy_(value)


# --- What the loop switches -----------------------------------------------------------------------
# A layer that is frozen after some steps, or a BatchNorm that is put into eval, is so after a
# resume too. Only what differs from how the script began is kept, so that its code may begin
# otherwise.

_Flags = dict[str, bool]


class Modes:
    """Made before the first step. ``modules``: by name, whose parts and parameters count."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._owners: dict[str, dict[str, Any]] = {"training": {}, "requires_grad": {}}
        for prefix, module in modules.items():
            parts, parameters = module.named_modules(), module.named_parameters()
            self._owners["training"] |= {f"{prefix}.{name}": one for name, one in parts}
            self._owners["requires_grad"] |= {f"{prefix}.{name}": one for name, one in parameters}
        self._begun = self.now()

    def now(self) -> Sequence[Sequence[bool]]:
        """Return all of them as they are: quick, for a rescue asks at each step."""
        return [list(map(attrgetter(kind), one.values())) for kind, one in self._owners.items()]

    def changed(self, now: Sequence[Sequence[bool]] | None = None) -> dict[str, _Flags]:
        """Return those that are not as they were, in what JSON can hold. ``now``: see now()."""
        pairs = zip(self._owners.items(), self._begun, now or self.now(), strict=True)
        found = {}
        for (kind, owners), begun, flags in pairs:
            both = zip(owners, begun, flags, strict=True)
            found[kind] = {name: on for name, was, on in both if on is not was}
        return found

    def put_back(self, stored: Mapping[str, _Flags]) -> None:
        """Switch what changed() returned; names that there are no more are passed over."""
        for kind, flags in stored.items():
            for name in flags.keys() & self._owners[kind].keys():
                setattr(self._owners[kind][name], kind, flags[name])


# --- Values: run.state() --------------------------------------------------------------------------
# A variable loses its value in each restart. These are registered as they are made, so they do
# not.

_PLAIN = (bool, int, float, str, type(None))


class Values:
    """Attributes that hold numbers, strings, None, and tuples of them; no others than at first."""

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", {})
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"run.state({name}=...): choose another name")
            self._values[name] = _checked(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a value. Only asked for what is no attribute of the class."""
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"run.state() was not given {name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Take a value. Raises ConfigError for a name that run.state() was not given."""
        if name not in self._values:
            raise ConfigError(
                f"run.state() was not given {name!r}: name all values there, with what they begin"
                f" with. It has {', '.join(self._values)}"
            )
        self._values[name] = _checked(name, value)

    def __repr__(self) -> str:
        """Show the values."""
        return f"state({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return all values by name."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Put values back. A name that is new keeps what it begins with."""
        self._values.update({name: state[name] for name in self._values if name in state})


def _checked(name: str, value: Any) -> Any:
    """Turn numbers of numpy into Python's; refuse tensors, which keep a graph or change later."""
    if isinstance(value, tuple):
        return tuple(_checked(name, part) for part in value)
    found = value.item() if isinstance(value, np.generic) else value
    if type(found) not in _PLAIN:
        raise ConfigError(
            f"run.state(): {name} cannot be a {type(value).__name__}; it holds numbers, strings,"
            " None, and tuples of these. Of a tensor take .item(); keep others by run.register()"
        )
    return found
