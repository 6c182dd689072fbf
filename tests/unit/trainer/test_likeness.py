"""Ranks whose datasets differ are found by a few numbers of a few samples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ddpjob_trainer.data import likeness
from ddpjob_trainer.data.fetch import Batches
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.training.run_config import take_data

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))


class Loud(Dataset[int]):
    """Of the user's own: it is never asked for a sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        raise AssertionError


def seen(dataset: Any) -> likeness.Likeness:
    found = json.loads(json.dumps(likeness.of(Batches(dataset, None, 5))))
    assert isinstance(found, dict)
    return found


def rows(values: Any) -> Any:
    return [(row, f"name {number:.3g}") for row, number in zip(values, values[:, 0], strict=True)]


DIFFERENT = [
    (TensorDataset(X), TensorDataset(X.flip(0)), "sample 0"),
    (TensorDataset(X, X[:, 0] > 0), TensorDataset(X, X[:, 0] < 0), "sample 0"),
    (rows(X.numpy()), rows(X.flip(0).numpy()), "sample 0"),
    (ConcatDataset([rows(X), rows(X)]), ConcatDataset([rows(X), rows(X * 2)]), "sample 45"),
    (Subset(Loud(), [1, 2, 3]), Subset(Loud(), [1, 2, 4]), "the indices of its Subset"),
    ([{"a": 1.5, "b": [torch.ones(2)]}], [{"a": 1.5, "b": [torch.zeros(2)]}], "sample 0"),
]


@pytest.mark.parametrize(("one", "other", "what"), DIFFERENT)
def test_what_differs_is_named(one: Any, other: Any, what: str) -> None:
    every = [seen(one), seen(one), seen(other)]
    likeness.check(every[:2])
    with pytest.raises(ConfigError, match=rf"dataset of rank 2 is not rank 0's, by {what}: "):
        likeness.check(every)
    assert f"by {what}:" in take_data({"data": every[0]}, every[2])
    assert not take_data({"data": every[0]}, every[1])


def test_the_last_bits_of_other_processors_are_no_difference() -> None:
    near = X.double() * (1 + 1e-6)
    likeness.check([seen(TensorDataset(X)), seen(TensorDataset(near.float()))])
    odd = torch.tensor([[torch.nan], [torch.inf]])
    likeness.check([seen(TensorDataset(odd)), seen(TensorDataset(odd))])


def test_what_is_not_known_is_no_difference() -> None:
    likeness.check([None, None])
    likeness.check([seen(Loud()), seen(Loud())])
    likeness.check([seen(TensorDataset(torch.zeros(4, dtype=torch.complex64)))] * 2)
    assert not take_data({}, seen(TensorDataset(X)))
    assert not take_data({"data": seen([np.float32(1)])}, None)
