"""From sample numbers to a batch on the right device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from ddpjob_trainer.data.permutation import Indices
from ddpjob_trainer.errors import ConfigError

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
    if device.type == "cpu":
        return batch  # where datasets live
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace every tensor in nested tuples, lists and mappings; all else stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, part in value.items():
            changed[key] = map_tensors(part, change)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change) for part in value)
    return value
