"""Whether the ranks read one dataset, as far as a few numbers of a few samples tell.

Data that is made, shuffled or split at random before start() has seeded the generators is another
one in each process, and after each restart: ranks would share out batches of different datasets.
Only what is indexed by torch's and Python's own code is looked at, so that no code of the user's
runs; of a Subset of anything, the indices.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.data.fetch import Batches
from ddpjob_trainer.data.order import digest
from ddpjob_trainer.errors import ConfigError

_SAMPLES = 8
_MOST = 64  # numbers of a sample: each snapshot's JSON holds them
_READ = 1 << 20  # elements of a tensor or array: it may be a file of gigabytes
#: Processors differ in the last bits of what they have computed.
_CLOSE = 1e-3

#: What tells one dataset from another, in what JSON holds.
Likeness = dict[str, Any]


def of(batches: Batches) -> Likeness:
    """What one process sees of its dataset."""
    found: Likeness = {"subset": None, "samples": {}}
    if batches.subset is not None:
        found["subset"] = digest(batches.subset)
    if batches.is_quiet:
        length = len(batches.dataset)
        places = np.unique(np.linspace(0, length - 1, min(length, _SAMPLES)).astype(np.int64))
        wanted = places if batches.subset is None else batches.subset[places]
        for index in wanted.tolist():
            found["samples"][str(index)] = _numbers(batches.base[index])
    return found


def _numbers(sample: Any) -> list[float]:
    """Of its tensors, arrays, numbers and strings, wherever they stand in it."""
    found: list[float] = []
    _collect(sample, found)
    found = [number if math.isfinite(number) else 0.0 for number in found]
    if len(found) <= _MOST:
        return found
    values = np.abs(found)  # of a list of tokens, say
    return [float(len(found)), *(float(part.mean()) for part in np.array_split(values, _MOST - 1))]


def _begin(value: Any) -> Any:
    """Its first elements, a view."""
    for axis, size in enumerate(value.shape):
        if (rest := math.prod(value.shape[axis + 1 :])) * size > _READ:
            kept = max(1, _READ // rest)
            value = value[(slice(None),) * axis + (slice(kept),)]
    return value


def _collect(value: Any, found: list[float]) -> None:
    if isinstance(value, torch.Tensor):
        plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        if plain.layout is torch.strided and plain.numel() and not plain.is_quantized:
            found.append(float(_begin(plain.detach()).double().abs().mean()))
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf" and value.size:
            found.append(float(np.abs(_begin(value).astype(np.float64)).mean()))
    elif isinstance(value, bool | int | float | np.number):
        found.append(float(value))
    elif isinstance(value, str):
        name = value.rpartition("/")[2]  # each machine may have its files in another folder
        found.append(float(zlib.crc32(name.encode(errors="replace"))))
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, found)


def difference(one: Likeness | None, other: Likeness | None) -> str:
    """What tells two datasets apart, in words; empty: nothing that is known."""
    if not one or not other:
        return ""
    if one["subset"] != other["subset"]:
        return "the indices of its Subset"
    for index, mine in one["samples"].items():
        if not _close(mine, other["samples"].get(index, mine)):
            return f"sample {index}"
    return ""


def check(every: Sequence[Likeness | None]) -> None:
    """Raise ConfigError where the ranks' datasets differ. ``every``: rank by rank."""
    for rank, one in enumerate(every):
        if what := difference(every[0], one):
            raise ConfigError(
                f"the dataset of rank {rank} is not rank 0's, by {what}: every rank must be given"
                " the whole dataset, the same one. What makes, shuffles or splits it at random"
                " belongs after ddp.start(), which seeds all ranks alike, or needs a seed"
            )


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE**3)
        for a, b in zip(one, other, strict=True)
    )
