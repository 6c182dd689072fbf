"""Data order: which samples a shard of a step sees.

A pure function of (seed, position in the run), so a resume needs one integer and no sampler
state, and neither workers nor prefetching can change it. The permutation is our own, a sort by
a keyed hash, because no library promises the same stream across versions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpjob_trainer.errors import ConfigError

Indices = npt.NDArray[np.int64]


def key64(*parts: int | str) -> int:
    """Mix any number of parts into 64 bits, equal on every machine and version."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permutation(seed: int, epoch: int, length: int) -> Indices:
    """Return a permutation of 0..length-1 that depends on seed and epoch only."""
    x = np.arange(length, dtype=np.uint64) + np.uint64(key64("order", seed, epoch))
    # splitmix64: every input bit reaches every output bit, and it is a bijection: no ties.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable").astype(np.int64)


def share(indices: Indices, part: int, parts: int) -> Indices:
    """Return one of ``parts`` contiguous parts whose sizes differ by at most one."""
    length = len(indices)
    return indices[length * part // parts : length * (part + 1) // parts]


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Epochs of global batches. ``tail`` says what becomes of an epoch's incomplete last batch.

    ``drop``: nothing; its samples are not lost, the next epoch's permutation is another one.
    ``pad``: it is filled up from the start of the same permutation. ``join``: it is smaller.
    """

    seed: int
    length: int  # samples in the dataset
    global_batch: int
    tail: str = "drop"

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch} must be at least 1")
        if not self.length:
            raise ConfigError("the dataset is empty")
        if self.length < self.global_batch and self.tail == "drop":
            raise ConfigError(
                f"the dataset has {self.length} samples, fewer than global_batch="
                f"{self.global_batch}: lower global_batch, or use tail='pad' or tail='join'"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch."""
        whole = self.length // self.global_batch
        return whole if self.tail == "drop" else -(-self.length // self.global_batch)

    def batch(self, step: int) -> Indices:
        """Return the samples of the global batch of ``step`` (from 0), in order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch
        order = _cached(self.seed, epoch, self.length)
        batch = order[start : start + self.global_batch]
        missing = self.global_batch - len(batch)
        if missing and self.tail == "pad":
            return np.concatenate([batch, np.resize(order, missing)])
        return batch

    def shard(self, step: int, shard: int, shards: int) -> Indices:
        """Return the contiguous share ``shard`` of ``shards`` equal shares of a step's batch."""
        batch = self.batch(step)
        if len(batch) % shards:
            raise ConfigError(
                f"global_batch={self.global_batch} cannot be divided by {shards} processes:"
                f" use a multiple of {shards}"
            )
        return share(batch, shard, shards)


_last: tuple[tuple[int, int, int], Indices] | None = None


def _cached(seed: int, epoch: int, length: int) -> Indices:
    """Keep the current epoch's permutation: sorting it anew at every step would be waste."""
    global _last
    key = (seed, epoch, length)
    if _last is None or _last[0] != key:
        _last = (key, permutation(seed, epoch, length))
    return _last[1]
