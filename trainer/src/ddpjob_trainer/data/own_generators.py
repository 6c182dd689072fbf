"""Generators that a dataset keeps for itself, as ``self.rng = numpy.random.default_rng(0)``.

Where they stand would depend on which samples this process has made before, and no snapshot holds
it. Seeded for each sample, they are functions of the position like torch's, numpy's and random's.
So are those of collate functions, samplers and streams, and those that a script's function reaches
as variables: its closure's, its class', or its module's.
"""

from __future__ import annotations

import dis
import hashlib
import logging
import random
import re
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

_MOST = 10_000  # objects that are looked at: many times what a dataset is made of
_LONG = 1_000  # entries of a list or dict: what is longer may hold the samples
_SOME = 64  # likewise where there are many such, as a list for each class
_FIRST = 8
_OWN = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
#: What leads to no generator, or, as a logger does, to all that there is.
_ENDS = (
    str, bytes, bytearray, int, float, complex, type(None), range, CodeType, ModuleType,
    np.generic, np.ndarray, torch.Tensor, torch.dtype, torch.device, logging.Logger,
)  # fmt: skip
#: A run leads to the loop's generators. Only what stands in place of the script's own is gone into.
_OURS = re.compile(r"ddpjob_trainer\.(?!data\.)")
_CONTAINERS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values, list: list.__iter__, tuple: tuple.__iter__, deque: deque.__iter__,
}  # fmt: skip
_ODD = 0x9E3779B97F4A7C15
#: The process' own, which are seeded anyway.
OF_ALL = {
    id(torch.default_generator),
    id(getattr(np.random.seed, "__self__", None)),
    id(getattr(random.seed, "__self__", None)),
}
#: How often seed() has seeded one, by id.
SEEDED: Counter[int] = Counter()
#: Python's own modules, what is installed, and ours: they draw from what they are given.
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    f"{Path(__file__).parent.parent}/",
)
#: Other folders of Debian's own Python, a user's, as of `pip install --user`, and PYTHONPATH's.
_INSTALLED = ("/site-packages/", "/dist-packages/")


def found_in(obj: Any) -> list[Any]:
    """Return those among its attributes, and theirs, each once: of its transforms, say."""
    return _search(obj)[0]


def _search(obj: Any) -> tuple[list[Any], bool]:
    """Those it leads to, and whether none can be overlooked.

    If it leads to too much, shorter lists too are taken for samples, of which the first are looked
    at: else a list for each class would use up the room, and hide what the transforms have.
    """
    found: dict[int, Any] = {}
    for long in _LONG, _SOME, _FIRST:
        walk = Walk([obj], long)
        found |= {id(one): one for one in walk.found}
        if walk.whole:
            return list(found.values()), long > _FIRST  # there 9 transforms are taken for samples
    return list(found.values()), False


def warn_of_more(dataset: Any, say: Callable[[str], None]) -> None:
    """Tell of a dataset, or a loader of one, in which some may be overlooked."""
    if not _search(dataset)[1]:
        say(
            f"warning: {type(getattr(dataset, 'dataset', dataset)).__name__} leads to more than"
            f" {_MOST} objects: random generators that it keeps for itself are looked for in those"
            " nearest to it only. What others draw depends on which samples this process has made"
            " before, and is other after a resume: keep them in attributes of the dataset itself"
        )


class Walk:
    """From objects to what they hold and use, nearest first, each once. ``whole``: to all of it.

    No code of theirs is run. The order is the same in every process, as the seeds go by it.
    ``long``: lists and dicts of more entries may hold samples.
    ``held``: only what they hold, as far as the first entries of lists and dicts tell.
    """

    def __init__(self, roots: Iterable[Any], long: int = _LONG, *, held: bool = False) -> None:
        self.found: list[Any] = []
        self.whole = True
        self.met: list[Any] = []  # held, so that no other object gets the id of one
        self._ids: set[int] = set()
        self._long = long
        self._held = held
        self._members: dict[type, list[MemberDescriptorType]] = {}
        self._meet(roots)
        for obj in self.met:  # which grows
            if not issubclass(type(obj), _OWN):
                self._meet(self._parts(obj))
            elif id(obj) not in OF_ALL:
                self.found.append(obj)

    def _meet(self, parts: Iterable[Any]) -> None:
        for part in parts:
            if _is_end(part) or id(part) in self._ids:
                continue
            if len(self.met) == (_LONG if self._held else _MOST):
                self.whole = False
                return
            self._ids.add(id(part))
            self.met.append(part)

    def _parts(self, obj: Any) -> Iterator[Any]:
        kind = type(obj)  # not isinstance(), which asks the object for a __class__ of its own
        if issubclass(kind, type):
            if not self._held and is_the_scripts(obj.__module__):
                yield from (*vars(obj).values(), *obj.__bases__)
        elif kind is FunctionType:
            if not self._held:
                yield from _used_by(obj)
        elif kind is BuiltinFunctionType:
            yield obj.__self__  # of a method, as ``rng.random``
        else:
            for container in _CONTAINERS:
                if issubclass(kind, container):
                    yield from self._entries(obj, container)
            if kind not in _CONTAINERS:
                yield from self._attributes(obj, kind)
                yield kind

    def _entries(self, obj: Any, kind: Any) -> Iterable[Any]:
        """All, but of a million samples the first."""
        entries, length = _CONTAINERS[kind], kind.__len__(obj)
        first = list(islice(entries(obj), _FIRST))
        if self._held or (length > self._long and _are_samples(first)):
            return first
        self.whole &= length <= _MOST  # else room is left for what else there is
        return islice(entries(obj), _MOST if length <= _MOST else _LONG)

    def _attributes(self, obj: Any, kind: type) -> Iterator[Any]:
        """Those of its dict and its slots. So the parts of a method, a property, a partial."""
        if kind not in self._members:
            found = [part for base in kind.__mro__ for part in vars(base).values()]
            self._members[kind] = [one for one in found if type(one) is MemberDescriptorType]
        for base in kind.__mro__:
            own = vars(base).get("__dict__")
            if type(own) is GetSetDescriptorType:
                yield from dict.values(own.__get__(obj))
                break
        for member in self._members[kind]:
            try:
                yield member.__get__(obj)
            except AttributeError:  # nothing yet
                continue


def _is_end(obj: Any) -> bool:
    kind = type(obj)
    return issubclass(kind, _ENDS) or _OURS.match(str(kind.__module__)) is not None


def _are_samples(entries: list[Any]) -> bool:
    """Whether each adds no generator of its own to those of the first."""
    every, one = (Walk(some, held=True) for some in (entries, entries[:1]))
    return every.whole and len(every.found) == len(one.found)


def _used_by(function: FunctionType) -> Iterator[Any]:
    """What a function reaches: its closure, what it wraps, and the script's own what it names."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from vars(function).values()
    if is_library(function.__code__.co_filename):
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for code in _codes(function.__code__):
        for name in _global_names(code):
            found = function.__globals__.get(name)
            if type(found) is ModuleType and is_the_scripts(found.__name__):
                yield from (vars(found)[n] for n in code.co_names if n in vars(found))
            yield found


def is_library(file: str) -> bool:
    """Whether code of this file is Python's own, installed, or ours."""
    return file.startswith((*_LIBRARIES, "<frozen ")) or any(part in file for part in _INSTALLED)


def is_the_scripts(module: str) -> bool:
    """Whether the module of this name is no library's."""
    if module == "__main__" or module not in sys.modules:
        return True
    file = getattr(sys.modules[module], "__file__", None)
    return file is not None and not is_library(file)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:  # of a lambda or a comprehension within
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _global_names(code: CodeType) -> Iterator[str]:
    """Not co_names, among which are all attributes."""
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_") and one.opname.endswith(("GLOBAL", "GLOBALS", "NAME")):
            yield one.argval


def mark(generator: Any) -> str:
    """What tells where it stands, in what JSON holds."""
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state().tolist()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = [
            part if isinstance(part, str | int | float) else part.tolist()
            for part in generator.get_state(legacy=True)
        ]
    else:
        state = generator.getstate() if not isinstance(generator, random.SystemRandom) else None
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


def seed(generators: Sequence[Any], key: int) -> None:
    """Seed each with 64 bits, no two alike, nor like the process' own."""
    for place, generator in enumerate(generators, 1):
        own = (key + place * _ODD) % 2**64
        SEEDED[id(generator)] += 1
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            generator.seed(own % 2**32)
