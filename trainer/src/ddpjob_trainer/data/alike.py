"""The order of a DataLoader's own batch sampler, drawn alike on all ranks.

``random.shuffle(batches)``, then ``batches[rank::ranks]``: by generators of each rank's own a batch
would go to two ranks, and another to none. What samples draw is each rank's own all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddpjob_trainer.data.order import key64
from ddpjob_trainer.data.seeding import kept, seed_generators


class Alike:
    """For the loader: its sampler, seeded before each batch. ``key`` is of the epoch."""

    def __init__(self, inner: Any, key: Callable[[], int]) -> None:
        self._inner = inner
        self._key = key
        self.first = b""  # what it drew first in this process

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        key, number = self._key(), 0
        with kept():
            seed_generators(key64(key, "begin"))
            iterator = iter(self._inner)
        while True:
            with kept():
                seed_generators(key64(key, number))
                try:
                    found = next(iterator)
                except StopIteration:
                    return
            number += 1
            self.first = self.first or repr(found).encode()
            yield found


def draw_alike(loader: DataLoader[Any], key: Callable[[], int]) -> Alike | None:
    """Have the sampler that decides a loader's batches draw by this key, and return it."""
    if isinstance(loader.dataset, IterableDataset):  # which has no order but its own
        return None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, name)
    if isinstance(inner, Alike):  # of a run before
        inner = inner._inner
    alike = vars(loader)[name] = Alike(inner, key)  # torch lets nobody assign it
    return alike
