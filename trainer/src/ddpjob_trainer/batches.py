"""From sample numbers to a batch on the right device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.order import Indices

Collate = Callable[[Sequence[Any]], Any]


class Dataset(Protocol):
    """A map-style dataset: torch.utils.data.Dataset with a length, or a plain list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check(dataset: object) -> None:
    """Raise ConfigError for a dataset that cannot be indexed."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{type(dataset).__name__} is not a map-style dataset: it needs __len__ and"
            " __getitem__ (streams are not supported)"
        )


def fetch(dataset: Any, indices: Indices, collate: Collate | None) -> Any:
    """Return the collated samples. A TensorDataset is indexed in one go."""
    if isinstance(dataset, TensorDataset) and collate is None:
        return dataset[torch.from_numpy(np.ascontiguousarray(indices))]
    wanted = indices.tolist()
    many = getattr(dataset, "__getitems__", None)
    samples = many(wanted) if many is not None else [dataset[index] for index in wanted]
    return (collate or default_collate)(samples)


def span(start: int, end: int) -> Indices:
    """Samples start to end - 1."""
    return np.arange(start, end, dtype=np.int64)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
