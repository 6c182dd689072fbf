"""Make a batch from its positions in the run, and move it to a device.

inputs.py calls Batches.make() in this process or in the workers, the loop to_device().
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from ddpjob_trainer.data import dataset_fingerprint, generators
from ddpjob_trainer.data.order import Indices, key64, words
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Accelerator

Collate = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Hold the run's settings that shape one rank's batches."""

    seed: int
    rank: int
    ranks: int
    global_batch: int
    parts: int  # batches of a step, over all ranks
    level: str
    tail: str
    collate: Collate | None
    accelerator: Accelerator
    say: Callable[[str], None]
    alive: Callable[[], None]

    @property
    def batch_size(self) -> int:
        """Count the samples of each batch."""
        return self.global_batch // self.parts

    def check_batch_size(self, found: object) -> None:
        """Raise ConfigError for a DataLoader with batches of another size."""
        if found != self.batch_size:
            raise ConfigError(
                f"the DataLoader's batch_size={found} must be {self.batch_size}:"
                f" global_batch={self.global_batch} in {self.parts} batches per step"
            )


class Dataset(Protocol):
    """Describe a map-style dataset: torch's Dataset with a length, or a plain list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check(dataset: object) -> None:
    """Raise ConfigError for a dataset that cannot be indexed."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{type(dataset).__name__} is not a map-style dataset, which has __len__ and"
            " __getitem__, as a DataLoader's .dataset may be"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Name a batch to make: its samples, and their positions in the run.

    ``compared``: not a batch is made, but the numbers by which ranks compare these samples.
    """

    samples: Indices
    positions: Indices
    compared: bool = False


class Batches:
    """Make batches of a map-style dataset, for any caller.

    ``draws``: random numbers may be used to make one. ``base``: what it is a Subset of, of Subsets
    too, and ``subset`` which of its samples, None for all. ``is_quiet``: no code of the user's runs
    when ``base`` is indexed. ``named``: generators that are seeded beside those that are found.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None, seed: int, named: Sequence[Any] = ()
    ) -> None:
        check(dataset)
        self.dataset = dataset
        self._collate = collate
        self._keys = [key64(use, seed) for use in ("sample", "collate", "after")]
        self.base, self.subset = _without_subsets(dataset)
        self._at_once = collate is None and _is_plain(self.base, TensorDataset)
        self.is_quiet = _is_quiet(self.base)
        self.draws = collate is not None or not self.is_quiet
        self._named = named
        # As this process has them: a worker_init_fn may have made some.
        self._own: list[Any] | None = None
        self._collates_own: list[Any] | None = None

    def make(self, work: Work) -> Any:
        """Return the collated batch. Its random numbers depend on the positions only."""
        wanted = work.samples if self.subset is None else self.subset[work.samples]
        if work.compared:
            samples = self._samples(wanted.tolist(), work.positions)
            return [dataset_fingerprint.numbers(sample) for sample in samples]
        if self._at_once:
            return self.base[torch.from_numpy(np.ascontiguousarray(wanted))]
        samples = self._samples(wanted.tolist(), work.positions)
        if self._collate is None:
            return default_collate(samples)
        key = int(words(self._keys[1], work.positions[:1])[0])
        generators.seed_generators(key)
        if self._collates_own is None:
            self._collates_own = generators.found_in(self._collate)
        generators.seed(self._collates_own, key)
        return self._collate(samples)

    def seed_after(self, positions: Indices) -> None:
        """Seed for what follows a batch, alike whichever process has made it."""
        generators.seed_generators(int(words(self._keys[2], positions[:1])[0]))

    def _samples(self, wanted: list[int], positions: Indices) -> list[Any]:
        many = getattr(self.base, "__getitems__", None)
        if not self.draws:
            return many(wanted) if many is not None else [self.base[index] for index in wanted]
        keys = words(self._keys[0], positions).tolist()
        if many is not None:
            self._seed(keys[0])
            found: list[Any] = many(wanted)
            return found
        samples = []
        for index, key in zip(wanted, keys, strict=True):
            self._seed(key)
            samples.append(self.base[index])
        return samples

    def _seed(self, key: int) -> None:
        generators.seed_generators(key)
        if self._own is None:
            self._own = generators.found_in(self.base, self._named)
        generators.seed(self._own, key)


def _without_subsets(dataset: Any) -> tuple[Any, Indices | None]:
    """Return what Subsets are of, and which of its samples they leave; None: all."""
    chosen: Indices | None = None
    while type(dataset) is Subset:
        inner = np.asarray(dataset.indices, dtype=np.int64)
        chosen = inner if chosen is None else inner[chosen]
        dataset = dataset.dataset
    return dataset, chosen


def _is_plain(dataset: object, kind: type) -> bool:
    """Tell whether it is of this kind and indexed by the kind's own code."""
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None)
        for name in ("__getitem__", "__getitems__")
    )


def _is_quiet(dataset: object) -> bool:
    """Tell whether indexing runs no code that might draw random numbers."""
    if _is_plain(dataset, ConcatDataset):
        return all(map(_is_quiet, dataset.datasets))  # type: ignore[attr-defined]
    if type(dataset) is Subset:
        return _is_quiet(dataset.dataset)
    return any(_is_plain(dataset, kind) for kind in (TensorDataset, list, tuple, range))


def to_device(batch: Any, accelerator: Accelerator) -> Any:
    """Move every tensor in nested tuples, lists and dicts; page-locked ones travel meanwhile.

    A host that is ahead of its GPU, as one that reads no result is, needs no thread to fetch ahead:
    the batch travels beside the steps before.
    """
    if not accelerator.queues:
        return batch  # where datasets live
    with accelerator.loading():
        return map_tensors(batch, accelerator.loaded)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace every tensor in nested tuples, lists and mappings; all else stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, part in value.items():
            changed[key] = map_tensors(part, change)
        return changed
    if isinstance(value, PackedSequence):  # its sizes stay on the CPU
        names = ("data", "sorted_indices", "unsorted_indices")
        return value._replace(**{n: map_tensors(getattr(value, n), change) for n in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change) for part in value)
    return value
