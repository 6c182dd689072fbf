"""Ranks whose datasets differ are told by lengths, indices and a few samples at equal positions."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ddpjob_trainer.data import fetch, generators
from ddpjob_trainer.data.fetch import BatchSettings
from ddpjob_trainer.data.inputs import Indexed, InputOptions, open_input
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.training.run_config import dataset_warning

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))


class Own(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows, self.calls = rows, list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return self.rows[index] + random.random() / 10


class Unseeded(Own):
    def __getitem__(self, index: int) -> Any:
        return index, random.SystemRandom().random()


def opened(dataset: Any, rank: int, *, ranks: int = 3, workers: int = 0, step: int = 2) -> Indexed:
    place = BatchSettings(
        seed=5, rank=rank, ranks=ranks, global_batch=6, parts=ranks, level="resume", tail="drop",
        collate=None, accelerator=accelerator.of(torch.device("cpu")), say=lambda text: None,
        alive=lambda: None,
    )  # fmt: skip
    found = open_input(dataset, InputOptions(workers=workers), place)
    assert isinstance(found, Indexed)
    found.start()
    found.begin(range(step, 6), lambda step: [np.arange(2) + step * 6 + rank * 2])
    return found


def compared(datasets: Sequence[Any], **options: Any) -> str:
    every = [opened(dataset, rank, **options) for rank, dataset in enumerate(datasets)]
    told = json.loads(json.dumps([[one.own, one.compared] for one in every]))
    every[0].compare([own for own, _ in told])
    for one in every:
        one.close()
    return every[0].compare_samples([samples for _, samples in told])


def rows(values: Any) -> Any:
    return [(row, f"name {number:.3g}") for row, number in zip(values, values[:, 0], strict=True)]


EQUAL: list[Callable[[], Any]] = [
    lambda: TensorDataset(X, X[:, 0] > 0),
    lambda: rows(X.numpy()),
    lambda: Own(X),
    lambda: Subset(Own(X), range(5, 30)),
    lambda: [{"a": object(), "b": torch.zeros(4, dtype=torch.complex64), "c": np.array("d")}] * 20,
    lambda: TensorDataset(torch.full((20, 1), torch.nan)),
    lambda: [torch.eye(3).to_sparse()] * 20,
    lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])] * 20,
    lambda: [torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)] * 20,
]


def test_equal_ones_are_compared_in_silence():
    for number, make in enumerate(EQUAL):
        assert compared([make() for _ in range(3)]) == "", number


DIFFERENT = [
    (TensorDataset(X), TensorDataset(X.flip(0)), "sample "),
    (TensorDataset(X, X[:, 0] > 0), TensorDataset(X, X[:, 0] < 0), "sample "),
    (rows(X.numpy()), rows(X.flip(0).numpy()), "sample "),
    (ConcatDataset([rows(X), rows(X)]), ConcatDataset([rows(X), rows(X * 2)]), "sample "),
    (Subset(Own(X), range(9)), Subset(Own(X), [*range(8), 9]), "the indices of its Subset"),
    (TensorDataset(X), TensorDataset(X[:39]), "its length"),
    ([{"a": 1, "b": [torch.ones(2)]}] * 9, [{"a": 1, "b": [torch.zeros(2)]}] * 9, "sample "),
]


def test_what_differs_is_refused_where_no_code_of_the_scripts_made_it():
    for one, other, what in DIFFERENT:
        words = f"dataset of rank 2 is not rank 0's, by {what}.*: give every rank the same whole"
        with pytest.raises(ConfigError, match=words):
            compared([one, one, other], step=1)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.tier("gate"))])
@pytest.mark.parametrize("other", [Own(X.flip(0)), Unseeded(X)])
def test_of_a_dataset_of_the_scripts_own_rank_0_warns(other, workers):
    """It may hold something of the rank on purpose, or draw from what nobody seeds."""
    first = type(other)(X)
    told = compared([first, first, other], workers=workers)
    assert told.startswith("warning: sample ")
    assert f"of {type(first).__name__} is not the same on ranks 0 and " in told
    assert "give every rank the whole dataset" in told
    assert "generators=[...]" in told


def test_three_samples_of_the_first_step_are_made_once_and_move_nothing():
    torch.manual_seed(1)
    before = generators.capture()
    every = [Own(X) for _ in range(3)]
    assert compared(every) == ""
    assert [len(one.calls) for one in every] == [3] * 3
    order = opened(TensorDataset(X), 0).order
    assert every[0].calls == order.samples(order.batch(2)[:3]).tolist()
    assert generators.capture() == before
    alone = Own(X)
    opened(alone, 0, ranks=1)
    assert alone.calls == [], "nothing to compare with"
    # A worker makes them: a file that is opened at the first sample is not to be shared by a fork.
    assert compared([alone] * 3, workers=1) == ""
    assert alone.calls == []


def test_a_snapshot_knows_the_length_and_the_indices():
    def of(dataset: Any) -> dict[str, Any]:
        found = json.loads(json.dumps(opened(dataset, 0).fingerprint))
        assert isinstance(found, dict)
        return found

    stored = of(Subset(Own(X), range(9)))
    assert dataset_warning({"data": stored}, stored) == ""
    changed = dataset_warning({"data": stored}, of(Subset(Own(X), [*range(8), 9])))
    assert "not that of the snapshot, by the indices of its Subset" in changed
    assert "by its length" in dataset_warning({"data": stored}, of(Subset(Own(X), range(8))))
    assert dataset_warning({}, stored) == ""
    assert dataset_warning({"data": stored}, None) == ""


def test_last_bits_and_folders_of_other_machines_are_no_difference():
    def of(sample: Any) -> list[list[list[float]]]:
        return [[fetch.sample_numbers(sample)]]

    pairs = [
        (X, (X.double() * (1 + 1e-6)).float()),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf])),
        (("/tmp/a1/3.png", 1), ("/tmp/b2/3.png", 1)),
    ]
    for one, other in pairs:
        assert fetch.first_unequal(of(one) + of(other)) is None
    long = list(range(50_000))
    assert len(fetch.sample_numbers(long)) < 100
    for one, other in [
        (X, X * 1.1), ("/tmp/3.png", "/tmp/3.jpg"), ([1, 2], [2, 1]), (long, [*long[:-1], 10**9]),
    ]:  # fmt: skip
        assert fetch.first_unequal(of(one) + of(other)) == (1, 0)
