"""Make a batch from its positions in the run, and move it to a device.

inputs.py calls Batches.make() in this process or in the workers, the loop to_device().
"""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ddpjob_trainer.data import generators
from ddpjob_trainer.data.order import Indices, key64, words
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Accelerator

# --- The dataset's fingerprint --------------------------------------------------------------------
# Data that is made, shuffled or split at random before start() has seeded the generators is
# another one in each process. inputs.py compares lengths and a Subset's indices between the ranks
# and with the snapshot, and a few numbers of the samples that each rank makes at the same first
# positions.

_MOST = 16  # numbers of a sample that travel
_READ = 1 << 20  # elements of a tensor or array
#: Processors differ in the last bits of what they have computed.
_CLOSE = 1e-3

#: ``length``, and ``subset``, a hash of the indices of a Subset, None for another dataset.
Fingerprint = dict[str, Any]
_WORDS = {"length": "its length", "subset": "the indices of its Subset"}


def dataset_difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Name what tells two datasets apart; empty: nothing."""
    if not one or not other:
        return ""
    return next((words for name, words in _WORDS.items() if one[name] != other[name]), "")


def dataset_refusal(rank: int, what: str) -> ConfigError:
    """Return the error for a rank with another dataset."""
    return ConfigError(
        f"the dataset of rank {rank} is not rank 0's, by {what}: give every rank the same whole"
        " dataset. If it is made, shuffled or split at random, do so after ddp.start(), which"
        " seeds all ranks alike, or with a seed"
    )


def sample_numbers(sample: Any) -> list[float]:
    """Return a few of a sample's tensors, arrays, numbers and strings, wherever they stand."""
    found: list[float] = []
    _collect(sample, found)
    found = [number if math.isfinite(number) else 0.0 for number in found]
    return [*found[:_MOST], math.fsum(map(abs, found))] if found else []


def first_unequal(every: Sequence[Sequence[Sequence[float]]]) -> tuple[int, int] | None:
    """Find the first rank whose samples' numbers are not rank 0's, and its first such sample."""
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


# --- Batches --------------------------------------------------------------------------------------

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
    """Name a batch to make: its samples, and their positions in the run."""

    samples: Indices
    positions: Indices
    compared: bool = False  # make the numbers by which ranks compare these samples


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
            return [sample_numbers(sample) for sample in samples]
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


# --- Workers --------------------------------------------------------------------------------------
# They are given what to make, batch by batch, so they decide nothing: with any number of them a
# run has the same bits. Forked before the snapshot is loaded, they start beside the load, and
# share none of the optimizer's memory. They die with the process that started them.

Init = Callable[[int], None]  # a worker_init_fn
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded after a fork


def dying_with_parent(init: Init | None, context: Any = None) -> Init:
    """Return a worker_init_fn that ties workers to the rank's life, then calls ``init``."""
    method = context if isinstance(context, str) else _start_method(context)
    # A fork server's children are the fork server's; torch looks for their rank now and then.
    parent = None if method == "forkserver" else os.getpid()
    return functools.partial(_begin_worker, parent, init)


def _start_method(context: Any) -> str:
    """Return how workers start, without settling it: the script may still choose."""
    if context is not None:
        return str(context.get_start_method())
    # Python's own default is fork up to 3.13 and forkserver from 3.14 on.
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _begin_worker(parent: int | None, init: Init | None, number: int) -> None:
    if parent is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)
    if init is not None:
        init(number)


class _Ahead:
    """Stand for a dataset of batches, indexed by the work to do. None is no work."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __getitem__(self, work: Work | None) -> Any:
        return None if work is None else (int(work.positions[0]), self.batches.make(work))


def _same(batch: Any) -> Any:
    return batch


def _show_dataset(batches: Batches, init: Init | None, number: int) -> None:
    """Let get_worker_info() show the user's own dataset to the user's code."""
    object.__setattr__(get_worker_info(), "dataset", batches.dataset)
    if init is not None:
        init(number)


class Workers:
    """Run worker processes: they start at once, begin() says what they shall make."""

    def __init__(
        self,
        batches: Batches,
        *,
        num_workers: int,
        prefetch_factor: int = 2,
        worker_init_fn: Init | None = None,
        multiprocessing_context: Any = None,
        **options: Any,
    ) -> None:
        self._idle = num_workers * prefetch_factor
        self._work: Iterator[Work] = iter(())
        init = functools.partial(_show_dataset, batches, worker_init_fn)
        loader: DataLoader[Any] = DataLoader(
            _Ahead(batches),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._asked(),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_same,
            worker_init_fn=dying_with_parent(init, multiprocessing_context),
            multiprocessing_context=multiprocessing_context,
            generator=torch.Generator(),  # else it would draw from ours
            **options,
        )
        self._batches: Iterator[Any] | None = iter(loader)

    def begin(self, work: Iterator[Work]) -> None:
        """Order this work, to be done in its order."""
        self._work = work
        for _ in range(self._idle):  # torch asks for work as it hands batches out
            self.next()

    def _asked(self) -> Iterator[Work | None]:
        """Yield what torch asks for: no work at first, then that of begin()."""
        yield from [None] * self._idle
        yield from self._work

    def next(self) -> Any:
        """Return the next batch, and the first of its positions.

        Raises what the dataset raised, RuntimeError for a dead worker.
        """
        assert self._batches is not None, "close() was called"
        return next(self._batches)

    def close(self) -> None:
        """End the processes."""
        self._batches = None  # torch ends them when nobody holds the iterator
