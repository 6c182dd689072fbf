"""Generators that a dataset keeps for itself, as ``self.rng = numpy.random.default_rng(0)``.

Where they stand would depend on which samples this process has made before, and no snapshot holds
it. Seeded for each sample, they are functions of the position like torch's, numpy's and random's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

_DEPTH = 4
_MOST = 64  # of a list or dict: samples may be among them
_OWN = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
_ODD = 0x9E3779B97F4A7C15


def found_in(obj: Any) -> list[Any]:
    """Return those among its attributes, and theirs, each once: of its transforms, say."""
    return list({id(found): found for found in _walk(obj, _DEPTH)}.values())


def _walk(obj: Any, depth: int) -> Iterator[Any]:
    if isinstance(obj, _OWN):
        yield obj
        return
    if isinstance(obj, dict):
        parts = list(islice(obj.values(), _MOST))
    elif isinstance(obj, list | tuple):
        parts = list(obj[:_MOST])
    elif isinstance(obj, torch.Tensor | np.ndarray | type) or not hasattr(obj, "__dict__"):
        return
    else:
        parts = list(vars(obj).values())
    for part in parts if depth else ():
        yield from _walk(part, depth - 1)


def seed(generators: Sequence[Any], key: int) -> None:
    """Seed each with 64 bits, no two alike, nor like the process' own."""
    for place, generator in enumerate(generators, 1):
        own = (key + place * _ODD) % 2**64
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            generator.seed(own % 2**32)
