"""Seed whatever a sample may draw from, by seed and place in the run.

Batches, streams and samplers call this before each sample, batch or epoch: torch's, numpy's and
random's own generators, and those that a dataset, its transforms, a collate function or a sampler
keep for themselves. found_in() looks at attributes and classes, not into functions or lists of
samples; run.steps(generators=...) names others, and the check of each restart finds the rest.
"""

from __future__ import annotations

import base64
import pickle
import random
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.data.order import key64

_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
#: Objects that a search looks at, and entries of a list or dict: what is longer holds samples.
_LOOKS, _ENTRIES = 20_000, 100
_ENDS = (
    str, bytes, bytearray, int, float, complex, type(None), range, CodeType, ModuleType,
    np.generic, np.ndarray, torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values, list: list.__iter__, tuple: tuple.__iter__, deque: deque.__iter__,
}  # fmt: skip
#: A run leads to the loop's generators. Only what replaces the script's own is gone into.
_OURS = re.compile(r"ddpjob_trainer\.(?!data\.)")
_ODD = 0x9E3779B97F4A7C15
#: The process' own, which are seeded anyway.
_OF_ALL = {
    id(torch.default_generator),
    id(getattr(np.random.seed, "__self__", None)),
    id(getattr(random.seed, "__self__", None)),
}
#: Python's own modules, what is installed, and ours: they draw from what they are given.
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    f"{Path(__file__).parent.parent}/",
)
#: Other folders of Debian's own Python, a user's, as of `pip install --user`, and PYTHONPATH's.
_INSTALLED = ("/site-packages/", "/dist-packages/")


# --- The process' own --------------------------------------------------------------------------


def seed_generators(key: int) -> None:
    """Seed torch on the CPU, numpy and random with 64 bits, in some 10 microseconds."""
    # Not torch.manual_seed(): until CUDA starts it formats a stack at each call, 0.3 ms.
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)


@contextmanager
def kept() -> Iterator[None]:
    """Leave every generator as it was found."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    state = torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


# --- Those of datasets, transforms, collate functions and samplers -----------------------------


def seed(generators: Sequence[Any], key: int) -> None:
    """Seed each with 64 bits, all different, also from the process' own; reseed() gets 32."""
    for place, generator in enumerate(generators, 1):
        own = (key + place * _ODD) % 2**64
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        elif isinstance(generator, np.random.RandomState | random.Random):
            generator.seed(own % 2**32)
        else:
            generator.reseed(own % 2**32)


def state_of(generator: Any) -> Any:
    """Return a generator's state, torch's as bytes on the CPU; None where it has none."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    return None


def mark(generator: Any) -> str:
    """Hash a generator's position in its sequence."""
    state = state_of(generator)
    plain = state.numpy() if isinstance(state, torch.Tensor) else state
    return blake2b(pickle.dumps(plain), digest_size=8).hexdigest()


def can_be_seeded(obj: Any) -> bool:
    """Tell whether seed() takes it: a generator, or an object with reseed(seed)."""
    return issubclass(type(obj), _GENERATORS) or callable(getattr(type(obj), "reseed", None))


def found_in(obj: Any, named: Sequence[Any] = ()) -> list[Any]:
    """Return those that an object leads to, nearest first, then those named: each once.

    Seeds go by that order, so it is the same in every process. No code of the script's is run.
    """
    found: list[Any] = []
    met: dict[int, Any] = {}  # by id; held, so that no other object gets one of these
    near = deque([obj])
    while near and len(met) < _LOOKS:
        held = near.popleft()
        if id(held) in met or id(held) in _OF_ALL or issubclass(type(held), _ENDS):
            continue
        met[id(held)] = held
        if can_be_seeded(held):
            found.append(held)
        if not issubclass(type(held), _GENERATORS):
            near.extend(_parts(held))
    return [*found, *(one for one in named if all(one is not other for other in found))]


def _parts(obj: Any) -> Iterator[Any]:
    kind = type(obj)
    if _OURS.match(str(kind.__module__)):
        return
    if issubclass(kind, type):
        if _is_the_scripts(str(obj.__module__)):
            yield from (*vars(obj).values(), *obj.__mro__[1:])
    elif kind is FunctionType:
        yield from list(vars(obj).values())  # not what its code names
    elif kind is BuiltinFunctionType:
        yield obj.__self__  # of a method, as ``rng.random``
    else:
        for container, entries in _CONTAINERS.items():
            if issubclass(kind, container) and container.__len__(obj) <= _ENTRIES:
                yield from list(entries(obj))  # at once: a thread may fill it
        if kind not in _CONTAINERS:
            yield from _attributes_of(obj).values()
            yield kind


def _attributes_of(obj: Any) -> dict[str, Any]:
    """Return the attributes in its dict and slots; thus a method's or partial's parts."""
    found: dict[str, Any] = {}
    with suppress(AttributeError):
        found |= object.__getattribute__(obj, "__dict__")
    for base in type(obj).__mro__:
        for name, member in vars(base).items():
            if type(member) is MemberDescriptorType:
                with suppress(AttributeError):  # nothing yet
                    found[name] = member.__get__(obj)
    return found


def _is_the_scripts(module: str) -> bool:
    """Tell whether the module of this name is neither Python's own, nor installed, nor ours."""
    if module == "__main__" or module not in sys.modules:
        return True
    file = getattr(sys.modules[module], "__file__", None)
    return not (
        file is None or file.startswith(_LIBRARIES) or any(part in file for part in _INSTALLED)
    )


# --- The state of the generators in a step --------------------------------------------------------
# Reseeding makes dropout and augmentation a pure function of the position in the run. The states
# are stored in snapshots all the same, for user code that draws between steps.


def reseed(seed: int, step: int, *place: int) -> None:
    """Seed torch (all devices), numpy and random for a step's shard or its part."""
    key = key64("torch", seed, step, *place)
    seed_generators(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)


def _pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def capture() -> dict[str, Any]:
    """Return the state of every generator of this process, in what JSON can hold.

    CUDA's only where the process uses it: to ask would begin to, also on a GPU that is broken.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": _pack(torch.get_rng_state()),
        "numpy": [str(name), np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _pack(torch.cuda.get_rng_state())
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put back what capture() returned."""
    torch.set_rng_state(_unpack(state["torch"]))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(_unpack(state["cuda"]))
