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
from typing import Any, TypeVar

import numpy as np
import torch

_LOOKS = 400_000  # at entries and attributes in a search: some tenths of a second
_MOST = 10_000  # entries of a list or dict that have generators of their own
_LONG = 1_000  # entries of a list or dict: what is longer may hold the samples
_FIRST = 8
_ASKED = 1_000  # looks at what the first entries of a long list hold
_TYPED = 100_000  # entries of a list or dict whose types are looked at, unless it is of numbers
_AT_ONCE = 16  # types for the time of a look
_REMEMBERED = 1024
_Of = TypeVar("_Of")
_Found = TypeVar("_Found")
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
    return Walk([obj]).found


def warn_of_more(dataset: Any, say: Callable[[str], None]) -> None:
    """Tell of a dataset, or a loader of one, in which some may be overlooked."""
    if not Walk([dataset]).whole:
        say(
            f"warning: {type(getattr(dataset, 'dataset', dataset)).__name__} leads to more"
            " objects than are looked at: random generators that it keeps for itself are looked for"
            " in those nearest to it only. What others draw depends on which samples this process"
            " has made before, and is other after a resume: keep them in attributes of the dataset"
            " itself"
        )


class Walk:
    """From objects to what they hold and use, nearest first, each once. ``whole``: to all of it.

    No code of theirs is run. The order is the same in every process, as the seeds go by it. Of a
    list or dict the first entries and one of each type come with what is near, the others after all
    that: else samples in a list for each class use up the looks, and hide what transforms have.
    ``held``: only what they hold, not what their code names, and of long lists only the first.
    """

    def __init__(self, roots: Iterable[Any], looks: int = 0, *, held: bool = False) -> None:
        self.found: list[Any] = []
        self._met: dict[int, Any] = {}  # by id; held, so that no other object gets one of these
        self._left = looks or _LOOKS
        self._held = held
        self._near: deque[Any] = deque()
        self._later: deque[tuple[Any, Any]] = deque()  # what has more entries, and its container
        self._last: list[tuple[Any, Any]] = []  # what may hold the samples
        self.whole = True
        self._reach(roots)
        for obj, kind in () if held else self._last:  # which grows
            self._reach_others(obj, kind)
        self.whole &= self._left > 0

    def _reach(self, parts: Iterable[Any]) -> None:
        self._meet(parts)
        while (self._near or self._later) and self._left > 0:
            if not self._near:
                obj, kind = self._later.popleft()
                self._meet(islice(_CONTAINERS[kind](obj), _FIRST, None))
                continue
            obj = self._near.popleft()
            if not issubclass(type(obj), _OWN):
                self._meet(self._parts(obj))
            elif id(obj) not in OF_ALL:
                self.found.append(obj)

    def _reach_others(self, obj: Any, kind: Any) -> None:
        """But of a million samples only some, if the first ones have no generators of their own."""
        entries, length = _CONTAINERS[kind], kind.__len__(obj)
        if self._have_own(list(islice(entries(obj), 2 * _FIRST))):
            self.whole &= length <= _MOST
            self._reach(islice(entries(obj), _FIRST, _MOST if length <= _MOST else _LONG))

    def _have_own(self, entries: list[Any]) -> bool:
        """Whether each holds others than the first, wherever else these have been met."""
        looks = max(1, min(_ASKED, self._left))
        one, every = (Walk(some, looks, held=True) for some in (entries[:1], entries))
        self._left -= 2 * looks - one._left - every._left
        more = len(one.found) != len(every.found)
        return more or (bool(one.found) and not every.whole)

    def _meet(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self._left -= 1
            if self._left <= 0:
                return
            if not _is_end(part) and id(part) not in self._met:
                self._met[id(part)] = part
                self._near.append(part)

    def _parts(self, obj: Any) -> Iterator[Any]:
        kind = type(obj)  # not isinstance(), which asks the object for a __class__ of its own
        if issubclass(kind, type):
            if not self._held and is_the_scripts(obj.__module__):
                yield from (*vars(obj).values(), *obj.__bases__)
        elif kind is FunctionType:
            yield from _used_by(obj, named=not self._held)
        elif kind is BuiltinFunctionType:
            yield obj.__self__  # of a method, as ``rng.random``
        else:
            for container in _CONTAINERS:
                if issubclass(kind, container):
                    yield from self._entries(obj, container)
            if all(kind is not container for container in _CONTAINERS):
                yield from self._attributes(obj, kind)
                yield kind

    def _entries(self, obj: Any, kind: Any) -> Iterator[Any]:
        """The first ones, and the first of each type."""
        entries, length = _CONTAINERS[kind], kind.__len__(obj)
        yield from islice(entries(obj), _FIRST)
        if length <= _FIRST:
            return
        firsts = self._of_each_type(obj, kind, _LONG)
        if all(map(_is_end, firsts)):
            return
        if length > _LONG:
            firsts = self._of_each_type(obj, kind, _TYPED)
        yield from firsts
        (self._later if length <= _LONG else self._last).append((obj, kind))

    def _of_each_type(self, obj: Any, kind: Any, most: int) -> list[Any]:
        """The first of each type among so many entries."""
        entries, firsts = _CONTAINERS[kind], dict[int, Any]()
        types = map(id, map(type, islice(entries(obj), most)))
        deque(map(firsts.setdefault, types, entries(obj)), 0)
        self._left -= min(kind.__len__(obj), most) // _AT_ONCE
        return list(firsts.values())

    def _attributes(self, obj: Any, kind: type) -> Iterator[Any]:
        """Those of its dict and its slots. So the parts of a method, a property, a partial."""
        for base in kind.__mro__:
            own = vars(base).get("__dict__")
            if type(own) is GetSetDescriptorType:
                yield from dict.values(own.__get__(obj))
                break
        for member in _slots(kind):
            try:
                yield member.__get__(obj)
            except AttributeError:  # nothing yet
                continue


def _by_identity(function: Callable[[_Of], _Found]) -> Callable[[_Of], _Found]:
    """As functools.lru_cache, but for what need have no hash: classes of a script's metaclass."""
    known: dict[int, tuple[_Of, _Found]] = {}

    def remembered(of: _Of) -> _Found:
        found = known.get(id(of))
        if found is None:
            if len(known) == _REMEMBERED:
                known.clear()
            found = known[id(of)] = of, function(of)
        return found[1]

    return remembered


def _is_end(obj: Any) -> bool:
    return _are_ends(type(obj))


@_by_identity
def _are_ends(kind: type) -> bool:
    return issubclass(kind, _ENDS) or _OURS.match(str(kind.__module__)) is not None


@_by_identity
def _slots(kind: type) -> list[MemberDescriptorType]:
    found = [part for base in kind.__mro__ for part in vars(base).values()]
    return [one for one in found if type(one) is MemberDescriptorType]


def _used_by(function: FunctionType, *, named: bool) -> Iterator[Any]:
    """What a function reaches: its closure, what it wraps, and the script's own what it names."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from vars(function).values()
    if is_library(function.__code__.co_filename):
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name, names in _global_names(function.__code__) if named else ():
        found = function.__globals__.get(name)
        if type(found) is ModuleType and is_the_scripts(found.__name__):
            yield from (vars(found)[n] for n in names if n in vars(found))
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


@_by_identity  # of a closure for each sample there is one code
def _global_names(function: CodeType) -> list[tuple[str, tuple[str, ...]]]:
    """And all names beside each: co_names, among which are all attributes."""
    return [
        (one.argval, code.co_names)
        for code in _codes(function)
        for one in dis.get_instructions(code)
        if one.opname.startswith("LOAD_") and one.opname.endswith(("GLOBAL", "GLOBALS", "NAME"))
    ]


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
