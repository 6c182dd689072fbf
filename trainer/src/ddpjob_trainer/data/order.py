"""Decide which samples each shard of a step sees: the data order.

A pure function of (seed, position in the run), evaluated position by position: a resume needs one
integer and no sampler state, and neither workers nor prefetching can change it. A *position*
counts the samples of the whole run's global batches: step x global_batch + place in the batch.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from operator import index
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ddpjob_trainer.errors import ConfigError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
#: Positions of each of this rank's batches of a step; a pure function.
Plan = Callable[[int], Sequence[Indices]]

#: Of the orders below, in a snapshot's fingerprint: a change of one is a change of this.
VERSION = 2
_BLOCK = 1024  # places of an epoch that are shuffled at once when fewer are asked for
_ROUNDS = 8
_SORTED = 1024  # up to this length a table is made
_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's: odd, and without a pattern


def key64(*parts: int | str) -> int:
    """Mix any number of parts into 64 bits, equal on every machine and version."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def words(key: int, numbers: npt.NDArray[np.integer]) -> Words:
    """Return 64 random bits for each number: a bijection of them, chosen by the key."""
    x = numbers.astype(np.uint64) * _GAMMA + np.uint64(key)
    # splitmix64's finaliser: every input bit reaches every output bit.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """Permute 0..length-1 by a key, evaluated in O(1) at any position.

    A Feistel network over two mixed-radix digits with cycle walking: no table, so an epoch of any
    length costs nothing to begin, and any position can be asked for. Short ones, whose digits would
    be too small to mix well, are sorted by a hash. Our own, because no library promises the same
    numbers across versions and machines.
    """

    def __init__(self, key: int, length: int) -> None:
        self.length = length
        self._table: Indices | None = None
        if length <= _SORTED:  # no two words are equal: words() is a bijection
            self._table = np.argsort(words(key, np.arange(length))).astype(np.int64)
        # High and low digit. The grid is hardly larger than the length, so few walk.
        self._low = math.isqrt(max(length - 1, 0)) + 1
        self._high = -(-length // self._low)
        self._keys = [key64("round", key, number) for number in range(_ROUNDS)]

    def __call__(self, positions: npt.NDArray[np.integer]) -> Indices:
        """Return the images of positions, each in 0..length-1, of any shape."""
        if self._table is not None:
            return np.take(self._table, positions)
        found = self._once(positions.astype(np.uint64))
        outside = np.flatnonzero(found >= self.length)
        while len(outside):  # the orbit of a point of 0..length-1 comes back there
            walked = self._once(found.flat[outside])
            found.flat[outside] = walked
            outside = outside[walked >= self.length]
        return found.astype(np.int64)

    def _once(self, points: Words) -> Words:
        """Permute the grid: each round adds to one digit a hash of the other."""
        high, low = np.divmod(points, np.uint64(self._low))
        for number, key in enumerate(self._keys):
            if number % 2:
                low = (low + words(key, high) % np.uint64(self._low)) % np.uint64(self._low)
            else:
                high = (high + words(key, low) % np.uint64(self._high)) % np.uint64(self._high)
        return high * np.uint64(self._low) + low


def share(indices: Indices, part: int, parts: int) -> Indices:
    """Return one of ``parts`` contiguous parts whose sizes differ by at most one."""
    length = len(indices)
    return indices[length * part // parts : length * (part + 1) // parts]


class Epochs(Protocol):
    """Map the places of an epoch to samples. A snapshot knows the order by name."""

    @property
    def length(self) -> int: ...  # noqa: D102

    @property
    def name(self) -> str: ...  # noqa: D102

    def samples(self, epoch: int, places: Indices) -> Indices: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Sequential:
    """Give every epoch in the dataset's own order."""

    length: int
    name: ClassVar[str] = "sequential"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places."""
        return places


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Give every epoch in another random order, each sample once."""

    seed: int
    length: int
    name: ClassVar[str] = f"shuffled/{VERSION}"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places."""
        block = int(places.min()) // _BLOCK
        if int(places.max()) // _BLOCK != block:
            return _permutation(self.seed, epoch, self.length)(places)
        return _shuffled_block(self, epoch, block)[places - block * _BLOCK]


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, length: int) -> Permutation:
    return Permutation(key64("order", seed, epoch), length)


@functools.lru_cache(maxsize=2)
def _shuffled_block(order: Shuffled, epoch: int, block: int) -> Indices:
    """Shuffle many places at once: that costs little more than a few."""
    places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, order.length))
    return _permutation(order.seed, epoch, order.length)(places)


class Weighted:
    """Draw a sample for every place by weights, with replacement: an epoch draws one per weight."""

    def __init__(self, seed: int, weights: npt.ArrayLike) -> None:
        try:
            given = np.asarray(weights, dtype=np.float64)
        except ValueError:  # texts, or of no one shape
            given = np.empty((0, 0))
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
    """Cut epochs into global batches; ``tail``: what becomes of an incomplete last one.

    ``drop``: nothing; its samples are not lost, the next epoch's order is another one. ``pad``:
    it is filled up from the start of the same epoch.
    """

    epochs: Epochs
    global_batch: int
    tail: str = "drop"
    steps_per_epoch: int = field(init=False)  # global batches in one epoch

    def __post_init__(self) -> None:
        steps = steps_per_epoch(self.epochs.length, self.global_batch, self.tail)
        object.__setattr__(self, "steps_per_epoch", steps)  # each step needs it, more than once

    def batch(self, step: int) -> Indices:
        """Return the positions of the global batch of ``step`` (from 0)."""
        return np.arange(self.global_batch, dtype=np.int64) + step * self.global_batch

    def samples(self, positions: Indices) -> Indices:
        """Return the samples at positions of one step."""
        step = int(positions[0]) // self.global_batch
        epoch, number = divmod(step, self.steps_per_epoch)
        places = positions - (step - number) * self.global_batch
        return self.epochs.samples(epoch, places % self.epochs.length)


def steps_per_epoch(samples: int | Sized, global_batch: int, tail: str = "drop") -> int:
    """Return an epoch's steps over so many samples, or over a dataset with a length.

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
            f"{global_batch}: lower global_batch, or use tail='pad'"
        )
    return length // global_batch if tail == "drop" else -(-length // global_batch)
