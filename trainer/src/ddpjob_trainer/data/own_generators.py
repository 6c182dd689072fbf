"""Generators that a dataset keeps for itself, as ``self.rng = numpy.random.default_rng(0)``.

Where they stand would depend on which samples this process has made before, and no snapshot holds
it. Seeded for each sample, they are functions of the position like torch's, numpy's and random's.
So are those of collate functions, samplers and streams, and those that a script's function reaches
as variables: its closure's, its class', or its module's.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import logging
import random
import re
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
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
_PROBED = 16  # entries of such a list that are compared, and as many from all over it
_ASKED = 250  # looks at what each of these holds
_SOME = 250  # entries of a list of more than most that are gone into, of these and those all over
_TYPED = 100_000  # entries of a list or dict whose types are looked at, unless it is of numbers
_TRIES = 1_000  # to read what a thread changes
_AT_ONCE = 32  # types for the time of a look
_REMEMBERED = 1024
_Of = TypeVar("_Of")
_Found = TypeVar("_Found")
_OWN = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
#: What leads to no generator, or, as a logger does, to all that there is.
_ENDS = (
    str, bytes, bytearray, int, float, complex, type(None), range, CodeType, ModuleType,
    np.generic, np.ndarray, torch.Tensor, torch.dtype, torch.device, logging.Logger,
)  # fmt: skip
_PLAIN = {id(dict), id(list), id(tuple)}  # a class need have no hash, nor an == of type's
_VALUES = str, bytes, int, float, complex, type(None)
#: A run leads to the loop's generators. Only what stands in place of the script's own is gone into.
_OURS = re.compile(r"ddpjob_trainer\.(?!data\.)")
_CONTAINERS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values, list: list.__iter__, tuple: tuple.__iter__, deque: deque.__iter__,
}  # fmt: skip
#: Of a class, without asking a metaclass of the script's.
_MODULE, _MRO, _DICT = (
    type.__dict__[name].__get__ for name in ("__module__", "__mro__", "__dict__")
)
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
        self._last: list[tuple[Any, Any, list[Any]]] = []  # what may hold the samples
        self.whole = True
        self._reach(roots)
        for obj, kind, firsts in () if held else self._last:  # which grows
            self._reach_others(obj, kind, firsts)
        self.whole &= self._left > 0

    def _reach(self, parts: Iterable[Any]) -> None:
        self._meet(parts)
        while (self._near or self._later) and self._left > 0:
            if not self._near:
                obj, kind = self._later.popleft()
                self._meet(_taken(obj, kind, _FIRST))
                continue
            obj = self._near.popleft()
            if not issubclass(type(obj), _OWN):
                self._meet(self._parts(obj))
            elif id(obj) not in OF_ALL:
                self.found.append(obj)

    def _reach_others(self, obj: Any, kind: Any, firsts: list[Any]) -> None:
        """But of a million samples only some, if those all over it have no generators of their own.

        Or of so many that what others among them have is met already.
        """
        length = kind.__len__(obj)
        some = _taken(obj, kind, 0, _PROBED) + _spread(obj, kind, length, _PROBED)
        if not self._have_own(firsts + some):
            return
        if length <= _MOST:
            self._reach(_taken(obj, kind, _FIRST))
            return
        self._reach(_taken(obj, kind, _FIRST, _SOME) + _spread(obj, kind, length, _SOME))
        known = len(self.found)
        self._reach(_spread(obj, kind, length, _SOME, between=True))
        self.whole &= len(self.found) == known

    def _have_own(self, entries: list[Any]) -> bool:
        """Whether one may hold others than the next does, wherever else these have been met."""
        found = set()
        for entry in entries:
            walk = Walk([entry], max(1, min(_ASKED, self._left)), held=True)
            self._left -= _ASKED - walk._left
            if not walk.whole:
                return True
            found.add(frozenset(map(id, walk.found)))
        return len(found) > 1

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
            if not self._held and is_the_scripts(_module(obj)):
                yield from (*_DICT(obj).values(), *_MRO(obj)[1:])
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
        length = kind.__len__(obj)
        yield from _taken(obj, kind, 0, _FIRST)
        if length <= _FIRST or (self._held and length > _LONG):
            return
        entries = _taken(obj, kind, 0, _MOST if length <= _MOST else _LONG)
        all_over = [] if length <= _MOST else _spread(obj, kind, length, _LONG)
        firsts = self._of_each_type(entries + all_over)
        if all(issubclass(type(first), _VALUES) for first in firsts):
            return
        if length > _MOST:
            firsts = self._of_each_type(_taken(obj, kind, 0, _TYPED) + all_over)
        firsts = [first for first in firsts if not _is_end(first)]
        if length > _LONG and firsts:
            self._last.append((obj, kind, firsts))
        elif firsts and not self._hold_ends(entries, firsts):
            self._later.append((obj, kind))
        else:
            return
        yield from firsts

    def _of_each_type(self, entries: list[Any]) -> list[Any]:
        """The first of each type."""
        firsts = _first_of_each_type(entries, entries)
        self._left -= len(entries) // _AT_ONCE + len(firsts)
        return firsts

    def _hold_ends(self, entries: list[Any], firsts: list[Any]) -> bool:
        """Whether but for ends they are tuples, lists and dicts of ends, as (path, label)."""
        if any(id(type(first)) not in _PLAIN for first in firsts):
            return False
        parts = [
            dict.values(one) if type(one) is dict else one
            for one in entries
            if id(type(one)) in _PLAIN
        ]
        looks = sum(map(len, parts)) // _AT_ONCE
        if looks > self._left:
            return False
        self._left -= looks
        try:
            every = _first_of_each_type(chain.from_iterable(parts), chain.from_iterable(parts))
        except RuntimeError:  # a thread changes one
            return False
        return all(map(_is_end, every))

    def _attributes(self, obj: Any, kind: type) -> Iterator[Any]:
        """Those of its dict and its slots. So the parts of a method, a property, a partial."""
        for base in _MRO(kind):
            own = _DICT(base).get("__dict__")
            if type(own) is GetSetDescriptorType:
                yield from list(dict.values(own.__get__(obj)))
                break
        for member in _slots(kind):
            try:
                yield member.__get__(obj)
            except AttributeError:  # nothing yet
                continue


def _taken(obj: Any, kind: Any, start: int, stop: int | None = None, step: int = 1) -> list[Any]:
    """Entries of a list or dict, though a thread may change it meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(RuntimeError):
            return list(islice(_CONTAINERS[kind](obj), start, stop, step))
    return []


def _spread(obj: Any, kind: Any, length: int, count: int, *, between: bool = False) -> list[Any]:
    """So many entries, evenly from all over it, or those half way from one of these to the next."""
    step = max(1, length // count)
    return _taken(obj, kind, step // 2 if between else 0, None, step)


def _first_of_each_type(entries: Iterable[Any], again: Iterable[Any]) -> list[Any]:
    """By identity: a class need have no hash. ``again``: the same entries."""
    firsts = dict[int, Any]()
    deque(map(firsts.setdefault, map(id, map(type, entries)), again), 0)
    return list(firsts.values())


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
    return issubclass(kind, _ENDS) or _OURS.match(_module(kind)) is not None


def _module(kind: type) -> str:
    """Its module's name, whatever a script has made of it."""
    try:
        found = _MODULE(kind)
    except AttributeError:  # it has none
        return ""
    return found if type(found) is str else ""


@_by_identity
def _slots(kind: type) -> list[MemberDescriptorType]:
    found = [part for base in _MRO(kind) for part in _DICT(base).values()]
    return [one for one in found if type(one) is MemberDescriptorType]


def _used_by(function: FunctionType, *, named: bool) -> Iterator[Any]:
    """What a function reaches: its closure, what it wraps, and the script's own what it names."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from list(vars(function).values())
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
