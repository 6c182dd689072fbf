"""Define what a snapshot asks of an object, and prepare optimizers for their return."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import Any, Protocol, cast

import numpy as np
import torch

from ddpjob_trainer.data.generators import state_of


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
    """Give an optimizer's tensors their parameters' strides again.

    Snapshots hold elements in C order. Fused kernels walk through memory and expect an average
    to lie as its parameter does, channels_last for instance.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if like.stride() != value.stride():
                    state[name] = like.copy_(value)
