"""Make users' samplers functions of (seed, epoch): one sampler, or those of a DataLoader.

inputs.py asks for the order of a map-style dataset: a sampler is read once per epoch, with
generators seeded for it. stream.py wraps the batch sampler of a DataLoader that is read as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ddpjob_trainer.data import generators
from ddpjob_trainer.data.generators import kept, seed_generators
from ddpjob_trainer.data.order import Indices, digest, key64
from ddpjob_trainer.errors import ConfigError


class Sampled:
    """Read the order of a torch Sampler, a sequence of indices, or an epoch's function.

    ``named``: generators to seed beside those that the sampler is found to keep.
    """

    def __init__(self, seed: int, sampler: Any, samples: int, named: Sequence[Any] = ()) -> None:
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                f"sampler={type(sampler).__name__} is a DistributedSampler, which gives each"
                " process its part, but run.steps() shares each global batch among the processes"
                " itself: give a sampler of the whole dataset, a function of the epoch that returns"
                " its indices, weights=, or only shuffle="
            )
        if not callable(sampler) and not hasattr(sampler, "__len__"):
            raise ConfigError(f"sampler={type(sampler).__name__} has no length: add __len__()")
        self._seed = seed
        self._sampler = sampler
        self._samples = samples
        self._named = named
        self._epoch = 0
        self._order = self._read(0)
        self.length = len(self._order)
        self.name = f"sampler:{digest(self._order)}"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places."""
        if epoch != self._epoch:
            order = self._read(epoch)
            if len(order) != self.length:
                raise ConfigError(
                    f"sampler gave {len(order)} indices for epoch {epoch} and {self.length} for"
                    " epoch 0: steps are counted by epochs of one length"
                )
            self._epoch, self._order = epoch, order
        return np.take(self._order, places)

    def _read(self, epoch: int) -> Indices:
        sampler = self._sampler
        with kept():
            key = key64("sampler", self._seed, epoch)
            seed_generators(key)
            generators.seed(generators.found_in(sampler, self._named), key)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(key)
            if not hasattr(sampler, "__iter__"):
                sampler = sampler(epoch)
            elif callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
            most = len(sampler) if hasattr(sampler, "__len__") else None
            if not isinstance(sampler, np.ndarray | torch.Tensor):
                sampler = list(itertools.islice(iter(sampler), most))
            return self._checked(np.asarray(sampler), epoch)

    def _checked(self, found: np.ndarray[Any, Any], epoch: int) -> Indices:
        if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
            raise ConfigError(
                f"sampler must give the index of one sample after another, not {found.dtype}"
                f" {list(found.shape)}: a batch sampler has no place here, global_batch decides"
            )
        if len(found) and not (found.min() >= 0 and found.max() < self._samples):
            raise ConfigError(
                f"sampler gave indices from {found.min()} to {found.max()} for epoch {epoch}, but"
                f" the dataset has 0 to {self._samples - 1}"
            )
        return found.astype(np.int64)


class SeededSampler:
    """Draw a DataLoader's own sampler by the same random numbers on all ranks.

    ``random.shuffle(batches)``, then ``batches[rank::ranks]``: by generators of each rank's own a
    batch would go to two ranks, and another to none, and no restart would show it. What samples
    draw is each rank's own all the same.
    """

    def __init__(self, inner: Any, key: int) -> None:
        self.inner = inner
        self.epoch = 0
        self.first = b""  # what it drew first in this process
        self._key = key

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        key = key64(self._key, self.epoch)
        with kept():
            seed_generators(key64(key, "begin"))
            iterator = iter(self.inner)
        for number in itertools.count():
            with kept():
                seed_generators(key64(key, number))
                try:
                    found = next(iterator)
                except StopIteration:
                    return
            self.first = self.first or repr(found).encode()
            yield found


def seed_sampler(loader: DataLoader[Any], key: int) -> SeededSampler | None:
    """Put a SeededSampler in the place of a loader's own. Return None where it has no order."""
    if isinstance(loader.dataset, IterableDataset):  # which has no order but its own
        return None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, name)
    if isinstance(inner, SeededSampler):  # of a run before
        inner = inner.inner
    seeded = vars(loader)[name] = SeededSampler(inner, key)  # torch lets nobody assign it
    return seeded


def is_indexed_loader(source: Any) -> bool:
    """Tell whether it is a DataLoader that makes usual batches of a map-style dataset.

    Those with batch samplers of their own, or none, are streams of batches; so is one whose class
    has its own __iter__(), which nobody else could run.
    """
    return (
        isinstance(source, DataLoader)
        and _is_torchs(source)
        and not isinstance(source.dataset, IterableDataset)
        and _is(source.batch_sampler, BatchSampler)
        and hasattr(source.sampler, "__len__")
    )


def options_of(sampler: Any) -> dict[str, Any]:
    """Return the options of run.steps() that give the order of a DataLoader's sampler."""
    if _is(sampler, DistributedSampler):
        return {"shuffle": bool(sampler.shuffle)}
    if _is(sampler, SequentialSampler):
        return {"shuffle": False}
    if _is(sampler, RandomSampler):
        whole = not sampler.replacement and len(sampler) == len(sampler.data_source)
        return {"shuffle": True} if whole else {"sampler": sampler}
    if _is(sampler, WeightedRandomSampler):
        usual = sampler.replacement and len(sampler) == len(sampler.weights)
        return {"weights": sampler.weights} if usual else {"sampler": sampler}
    return {"sampler": sampler}


def _is_torchs(loader: DataLoader[Any]) -> bool:
    """Tell whether torch's own code, or torchdata's, decides what a DataLoader yields."""
    mine: Any = type(loader)
    base = next(kind for kind in mine.__mro__ if _of_torch(kind))
    return all(
        getattr(mine, name) is getattr(base, name)
        for name in ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
    )


def _is(obj: object, kind: type) -> bool:
    """Tell whether it is of torch's own class, or of torchdata's with that name."""
    return type(obj).__name__ == kind.__name__ and _of_torch(type(obj))


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchdata")
