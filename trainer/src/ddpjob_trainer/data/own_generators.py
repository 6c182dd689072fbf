"""Generators that a dataset keeps for itself, as ``self.rng = numpy.random.default_rng(0)``.

Where they stand would depend on which samples this process has made before, and no snapshot holds
it. Seeded for each sample, they are functions of the position like torch's, numpy's and random's.
So are those of collate functions, samplers and streams, and those that a script's function reaches
as variables: its closure's, or its module's.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_DEPTH = 4
_MOST = 64  # of a list or dict: samples may be among them
_OWN = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
_ODD = 0x9E3779B97F4A7C15
#: The process' own, which are seeded anyway.
OF_ALL = {
    id(torch.default_generator),
    id(getattr(np.random.seed, "__self__", None)),
    id(getattr(random.seed, "__self__", None)),
}
#: How often seed() has seeded one, by id.
SEEDED: Counter[int] = Counter()
#: Python's own modules and what is installed: they draw from what they are given.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
#: Other folders of Debian's own Python, a user's, as of `pip install --user`, and PYTHONPATH's.
_INSTALLED = ("/site-packages/", "/dist-packages/")


def found_in(obj: Any) -> list[Any]:
    """Return those among its attributes, and theirs, each once: of its transforms, say."""
    return list({id(found): found for found in _walk(obj, _DEPTH, set())}.values())


def _walk(obj: Any, depth: int, functions: set[int]) -> Iterator[Any]:
    """``functions``: ids of code that has been looked at."""
    if isinstance(obj, _OWN):
        if id(obj) not in OF_ALL:
            yield obj
        return
    if isinstance(obj, torch.Tensor | np.ndarray | type | ModuleType) or not depth:
        return
    for part in _parts(obj, functions):
        yield from _walk(part, depth - 1, functions)


def _parts(obj: Any, functions: set[int]) -> list[Any]:
    if isinstance(obj, dict):
        return list(islice(obj.values(), _MOST))
    if isinstance(obj, list | tuple):
        return list(obj[:_MOST])
    if isinstance(obj, functools.partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, MethodType):
        return [obj.__self__, obj.__func__]
    if isinstance(obj, FunctionType):
        return _used_by(obj, functions)
    found = list(vars(obj).values()) if hasattr(obj, "__dict__") else []
    for kind in type(obj).__mro__:
        found += [part for part in vars(kind).values() if isinstance(part, FunctionType)]
    return found


def _used_by(function: FunctionType, functions: set[int]) -> list[Any]:
    """What a function of the script's own reaches: its closure, defaults, and of its module the
    generators and functions.
    """
    code = function.__code__
    if id(code) in functions or is_library(code.co_filename):
        return []
    functions.add(id(code))
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    named = (function.__globals__.get(name) for name in _names(code))
    return [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        *cells,
        *(found for found in named if isinstance(found, (*_OWN, FunctionType))),
    ]


def is_library(file: str) -> bool:
    """Whether code of this file is Python's own, or installed."""
    return file.startswith((*_LIBRARIES, "<frozen ")) or any(part in file for part in _INSTALLED)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # of a lambda or a comprehension within
        if isinstance(inner, CodeType):
            yield from _names(inner)


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
