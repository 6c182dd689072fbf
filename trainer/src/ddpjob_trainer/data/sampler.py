"""Data order: which samples a shard of a step sees.

A pure function of (seed, position in the run), evaluated position by position: a resume needs one
integer and no sampler state, and neither workers nor prefetching can change it. A *position*
counts the samples of the whole run's global batches: step x global_batch + place in the batch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sized
from dataclasses import dataclass
from operator import index
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddpjob_trainer.data.permutation import Indices, Permutation, key64, words
from ddpjob_trainer.errors import ConfigError

#: Of the orders below, in a snapshot's fingerprint: a change of one is a change of this.
VERSION = 2
_BLOCK = 1024  # places of an epoch that are shuffled at once when fewer are asked for


def share(indices: Indices, part: int, parts: int) -> Indices:
    """Return one of ``parts`` contiguous parts whose sizes differ by at most one."""
    length = len(indices)
    return indices[length * part // parts : length * (part + 1) // parts]


class Epochs(Protocol):
    """Which sample stands at which place of an epoch."""

    @property
    def length(self) -> int:
        """Places in each epoch."""
        ...

    @property
    def name(self) -> str:
        """What tells it from other orders, in a snapshot."""
        ...

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """Every epoch in the dataset's own order."""

    length: int

    @property
    def name(self) -> str:
        """What tells it from other orders."""
        return "sequential"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places."""
        return places


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Every epoch in another random order, each sample once."""

    seed: int
    length: int

    @property
    def name(self) -> str:
        """What tells it from other orders."""
        return f"shuffled/{VERSION}"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places."""
        if not len(places):
            return places
        block = int(places.min()) // _BLOCK
        if int(places.max()) // _BLOCK != block:
            return _permutation(self.seed, epoch, self.length)(places)
        return _shuffled_block(self, epoch, block)[places - block * _BLOCK]


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, length: int) -> Permutation:
    return Permutation(key64("order", seed, epoch), length)


@functools.lru_cache(maxsize=2)
def _shuffled_block(order: Shuffled, epoch: int, block: int) -> Indices:
    """One call for many places costs little more than one for a few."""
    places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, order.length))
    return _permutation(order.seed, epoch, order.length)(places)


class Weighted:
    """Every place draws a sample with the probability of its weight, with replacement.

    An epoch has as many places as there are samples. A draw is a binary search.
    """

    def __init__(self, seed: int, weights: npt.ArrayLike) -> None:
        given = np.asarray(weights, dtype=np.float64)
        if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any() or not given.any():
            raise ConfigError(
                "weights must be one finite number per sample, none negative, not all 0"
            )
        self._seed = seed
        self._sums = np.cumsum(given)
        self._last = int(np.flatnonzero(given)[-1])
        self.length = len(given)
        self.name = f"weighted/{VERSION}:{digest(given)}"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the draws of these places."""
        drawn = words(key64("weights", self._seed, epoch), places) >> np.uint64(11)
        points = drawn.astype(np.float64) * (2.0**-53 * self._sums[-1])
        found: Indices = np.searchsorted(self._sums, points, side="right").astype(np.int64)
        return np.minimum(found, self._last)  # rounding may reach the sum itself


def digest(array: npt.NDArray[np.generic]) -> str:
    """Hash an array, for a fingerprint."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Global batches over epochs. ``tail`` says what becomes of an epoch's incomplete last batch.

    ``drop``: nothing; its samples are not lost, the next epoch's order is another one. ``pad``:
    it is filled up from the start of the same epoch. ``join``: it is smaller.
    """

    epochs: Epochs
    global_batch: int
    tail: str = "drop"

    def __post_init__(self) -> None:
        steps_per_epoch(self.epochs.length, self.global_batch, self.tail)  # says what is wrong

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch."""
        return steps_per_epoch(self.epochs.length, self.global_batch, self.tail)

    def batch(self, step: int) -> Indices:
        """Return the positions of the global batch of ``step`` (from 0)."""
        start = step % self.steps_per_epoch * self.global_batch
        size = self.global_batch
        if self.tail == "join":
            size = min(size, self.epochs.length - start)
        return np.arange(size, dtype=np.int64) + step * self.global_batch

    def shard(self, step: int, shard: int, shards: int) -> Indices:
        """Return the contiguous share ``shard`` of ``shards`` equal shares of a step's batch."""
        batch = self.batch(step)
        if len(batch) % shards:
            raise ConfigError(
                f"global_batch={self.global_batch} cannot be divided by {shards} processes:"
                f" use a multiple of {shards}"
            )
        return share(batch, shard, shards)

    def samples(self, positions: Indices) -> Indices:
        """Return the samples at positions of one step."""
        if not len(positions):
            return positions
        step = int(positions[0]) // self.global_batch
        epoch, number = divmod(step, self.steps_per_epoch)
        places = positions - (step - number) * self.global_batch
        return self.epochs.samples(epoch, places % self.epochs.length)


def steps_per_epoch(samples: int | Sized, global_batch: int, tail: str = "drop") -> int:
    """Return the steps of one epoch over so many samples, or over a dataset with a length.

    Raises ConfigError for sizes that no run can have.
    """
    if hasattr(samples, "batch_sampler"):
        raise ConfigError("steps_per_epoch() counts samples: give it the DataLoader's dataset")
    length = len(samples) if isinstance(samples, Sized) else index(samples)
    if global_batch < 1:
        raise ConfigError(f"global_batch={global_batch} must be at least 1")
    if not length:
        raise ConfigError("the dataset is empty")
    if length < global_batch and tail == "drop":
        raise ConfigError(
            f"the dataset has {length} samples, fewer than global_batch="
            f"{global_batch}: lower global_batch, or use tail='pad' or tail='join'"
        )
    return length // global_batch if tail == "drop" else -(-length // global_batch)
