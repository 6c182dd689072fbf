"""Ranks whose datasets differ are found by a few numbers of a few samples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ddpjob_trainer.data import dataset_fingerprint as likeness
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


def test_a_long_sample_is_told_in_few_numbers() -> None:
    """Each snapshot holds them."""
    one, other = [[*range(50_000)] for _ in range(9)], [[*range(50_000)] for _ in range(9)]
    other[8][40_000] = 10**9
    found = seen(one)
    assert len(json.dumps(found)) < 20_000
    assert likeness.difference(found, seen(one)) == ""
    assert likeness.difference(found, seen(other)) == "sample 8"


class Huge(np.ndarray[Any, Any]):
    """As a file of gigabytes is: not to be copied."""

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        assert self.size <= 1 << 20
        return super().astype(*args, **kwargs)


@pytest.mark.parametrize("shape", [(1 << 24,), (3, 1 << 23), (1 << 22, 2, 3)])
def test_of_a_large_array_only_the_begin_is_read(shape: tuple[int, ...]) -> None:
    array = np.broadcast_to(np.ones(1, np.uint8), shape).view(Huge)
    assert seen([array])["samples"] == {"0": [1.0]}


def test_files_may_lie_elsewhere_on_each_machine() -> None:
    def files(folder: str, ending: str = "png") -> Any:
        return [(f"{folder}/{number}.{ending}", number % 2) for number in range(9)]

    assert likeness.difference(seen(files("/tmp/a1")), seen(files("/tmp/b2"))) == ""
    assert likeness.difference(seen(files("/tmp/a1")), seen(files("/tmp/a1", "jpg"))) != ""
