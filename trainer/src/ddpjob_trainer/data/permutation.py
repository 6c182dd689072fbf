"""A keyed pseudo-random permutation of 0..n-1, evaluated position by position in O(1).

A Feistel network over two mixed-radix digits with cycle walking: no table, so an epoch of any
length costs nothing to begin, and any position can be asked for. Short ones, whose digits would
be too small to mix well, are sorted by a hash. Our own, because no library promises the same
numbers across versions and machines.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

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
    """A permutation of 0..length-1 that depends on the key only."""

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
