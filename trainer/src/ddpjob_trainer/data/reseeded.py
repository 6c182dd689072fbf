"""A stream that is read by worker processes of a loader which keeps its state.

Such a loader saves where each worker is, but not the worker's random numbers. So they are seeded
before each sample, from the worker's own seed and the number of the sample, which is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddpjob_trainer.data.order import key64, words
from ddpjob_trainer.data.seeding import seed_generators


class _Reseeded(IterableDataset[Any]):
    """For the loader: the stream, with seeded samples. Without a state it is read again."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._count = 0  # samples of this worker in this epoch

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        # The loader draws workers' seeds for each epoch, and saves what they are made of.
        key = key64("worker", info.seed if info is not None else 0)
        iterator = iter(self.dataset)
        while True:
            seed_generators(int(words(key, np.array([self._count]))[0]))
            self._count += 1
            try:
                sample = next(iterator)
            except StopIteration:
                self._count = 0
                return
            yield sample


class _Stateful(_Reseeded):
    def state_dict(self) -> dict[str, Any]:
        """The stream's own, and the number of the next sample."""
        return {"samples": self._count, "stream": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both back."""
        self._count = state["samples"]
        self.dataset.load_state_dict(state["stream"])


def reseed_workers(loader: DataLoader[Any]) -> None:
    """Have a loader's workers draw what depends on its saved state only."""
    dataset = loader.dataset
    if not loader.num_workers or not isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, _Reseeded):
        return
    kind = _Stateful if callable(getattr(dataset, "state_dict", None)) else _Reseeded
    vars(loader)["dataset"] = kind(dataset)  # torch refuses to have it assigned
