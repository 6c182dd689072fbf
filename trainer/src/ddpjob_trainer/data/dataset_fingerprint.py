"""Tell whether all ranks have one dataset, and a resume that of its snapshot.

Data that is made, shuffled or split at random before start() has seeded the generators is another
one in each process. inputs.py compares lengths and a Subset's indices between the ranks and with
the snapshot, and a few numbers of the samples that each rank makes at the same first positions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.data.order import Indices, digest
from ddpjob_trainer.errors import ConfigError

_MOST = 16  # numbers of a sample that travel
_READ = 1 << 20  # elements of a tensor or array
#: Processors differ in the last bits of what they have computed.
_CLOSE = 1e-3

#: ``length``, and ``subset``, a hash of the indices of a Subset, None for another dataset.
Fingerprint = dict[str, Any]
_WORDS = {"length": "its length", "subset": "the indices of its Subset"}


def of(dataset: Any, subset: Indices | None) -> Fingerprint:
    """Return what a snapshot holds of a dataset."""
    return {"length": len(dataset), "subset": None if subset is None else digest(subset)}


def difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Name what tells two datasets apart; empty: nothing."""
    if not one or not other:
        return ""
    return next((words for name, words in _WORDS.items() if one[name] != other[name]), "")


def refusal(rank: int, what: str) -> ConfigError:
    """Return the error for a rank with another dataset."""
    return ConfigError(
        f"the dataset of rank {rank} is not rank 0's, by {what}: every rank must be given"
        " the whole dataset, the same one. What makes, shuffles or splits it at random"
        " belongs after ddp.start(), which seeds all ranks alike, or needs a seed"
    )


def numbers(sample: Any) -> list[float]:
    """Return a few of a sample's tensors, arrays, numbers and strings, wherever they stand."""
    found: list[float] = []
    _collect(sample, found)
    found = [number if math.isfinite(number) else 0.0 for number in found]
    return [*found[:_MOST], math.fsum(map(abs, found))] if found else []


def first_unequal(every: Sequence[Sequence[Sequence[float]]]) -> tuple[int, int] | None:
    """Find the first rank that differs from rank 0, and its first such sample.

    ``every``: of each rank the numbers of each sample.
    """
    for rank, theirs in enumerate(every):
        for place, (one, other) in enumerate(zip(every[0], theirs, strict=True)):
            if len(one) != len(other) or not np.allclose(one, other, _CLOSE, _CLOSE**3):
                return rank, place
    return None


def _collect(value: Any, found: list[float]) -> None:
    if isinstance(value, torch.Tensor):
        dense = value.layout is torch.strided and not value.is_nested and not value.is_quantized
        if dense and value.numel():
            few = value.detach().flatten()[:_READ]
            real = torch.view_as_real(few.resolve_conj()) if few.is_complex() else few
            found.append(float(real.double().abs().mean()))
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf" and value.size:
            found.append(float(np.abs(value.reshape(-1)[:_READ].astype(np.float64)).mean()))
    elif isinstance(value, bool | int | float | np.number):
        found.append(float(value))
    elif isinstance(value, str):
        name = value.rpartition("/")[2]  # each machine may have its files in another folder
        found.append(float(zlib.crc32(name.encode(errors="replace"))))
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _collect(part, found)
