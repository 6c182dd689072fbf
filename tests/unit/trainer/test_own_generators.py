"""Generators of a script's own, wherever it keeps them: what they draw depends on the position."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpjob_trainer.data import own_generators
from ddpjob_trainer.data.fetch import Batches, Work
from ddpjob_trainer.data.stream import Stream
from ddpjob_trainer.data.user_samplers import Sampled

RNG = np.random.default_rng(1)
LAZY = random.Random(1)


class Shuffles:
    """A sampler, or a collate function, that draws from its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(9).tolist())

    def __call__(self, samples: Sequence[Any]) -> float:
        return float(self.rng.random())


def of_a_closure() -> Callable[[Any], list[int]]:
    rng = random.Random(1)
    return lambda _: rng.sample(range(9), 9)


def of_the_module(_: Any) -> list[int]:
    return [int(number) for number in RNG.permutation(9)]


def by_another_function(given: Any) -> list[int]:
    return [*of_the_module(given)]


def of_a_default(_: Any, rng: Any = np.random.default_rng(1)) -> list[int]:  # noqa: B008
    return [int(number) for number in rng.permutation(9)]


class Lazy(Dataset[float]):
    """Its generator is a variable of its module."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> float:
        return max(LAZY.random() for _ in range(1))


class Counted(IterableDataset[float]):
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __iter__(self) -> Iterator[float]:
        for _ in range(4):
            yield self.rng.random()


MADE: list[Callable[[], Any]] = [
    Shuffles,
    of_a_closure,
    lambda: of_the_module,
    lambda: by_another_function,
    lambda: of_a_default,
    lambda: functools.partial(of_a_default, rng=random.Random(1)),
    lambda: Shuffles().__iter__,
]


@pytest.mark.parametrize("make", MADE)
def test_they_are_found(make: Callable[[], Any]) -> None:
    found = own_generators.found_in(make())
    assert found
    assert all(isinstance(one, np.random.Generator | random.Random) for one in found)


def test_what_libraries_draw_from_is_not_looked_for() -> None:
    assert own_generators.found_in(random.shuffle) == []
    assert own_generators.found_in(torch.utils.data.default_collate) == []


@pytest.mark.parametrize("make", MADE[:5])
def test_a_sampler_gives_an_epoch_the_same_order_whatever_came_before(
    make: Callable[[], Any],
) -> None:
    def order_of(epochs: Sequence[int]) -> list[int]:
        order = Sampled(5, make(), 9)
        found = [order.samples(epoch, np.arange(9)) for epoch in epochs]
        return [int(number) for number in found[-1]]

    assert order_of([0, 1, 2]) == order_of([2])
    assert order_of([1]) != order_of([2])


def made(batches: Batches, *positions: int) -> Any:
    return batches.make(Work(np.array(positions), np.array(positions)))


def test_a_collate_functions_own_depend_on_the_position_only() -> None:
    batches, other = (Batches([1, 2, 3, 4], Shuffles(), 5) for _ in range(2))
    made(batches, 0, 1)
    assert made(batches, 2, 3) == made(other, 2, 3) != made(other, 0, 1)


def test_those_of_a_datasets_module_do_too() -> None:
    batches = Batches(Lazy(), list, 5)
    first = made(batches, 0, 1)
    assert made(batches, 0, 1) == first != made(batches, 1, 2)


def test_a_stream_that_is_read_again_gives_what_it_gave() -> None:
    def stream() -> Stream:
        return Stream(
            Counted(), batch=2, rows=None, collate=collate, seed=5, rank=0,
            say=lambda text: None, alive=lambda: None,
        )  # fmt: skip

    def collate(samples: Sequence[Any]) -> tuple[list[Any], float]:
        return list(samples), noise(samples)

    noise = Shuffles()
    before = stream()
    for _ in range(3):
        before.next()  # the third is of its second epoch
    state, wanted = before.state_dict(), before.next()
    noise = Shuffles()
    after = stream()
    after.load_state_dict(state)
    assert after.next() == wanted


class Sharded(IterableDataset[int]):
    """All ranks shuffle alike, and each takes its part; ``noise`` is each rank's own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rng, self.noise = random.Random(7), np.random.default_rng(rank)

    def __iter__(self) -> Iterator[Any]:
        files = list(range(12))
        self.rng.shuffle(files)
        for file in files[self.rank :: 3]:
            yield file, float(self.noise.random())


def test_what_all_ranks_shuffle_alike_they_still_do() -> None:
    """Else some files would be read by two of them, and others by none."""
    streams = [
        Stream(
            Sharded(rank), batch=4, rows=None, collate=list, seed=5, rank=rank,
            say=lambda text: None, alive=lambda: None,
        )
        for rank in range(3)
    ]  # fmt: skip
    for stream in streams:
        stream.compare([one.own for one in streams])
    orders = []
    for _ in range(2):
        samples = [sample for stream in streams for sample in stream.next()]
        orders.append([file for file, _ in samples])
        assert sorted(orders[-1]) == list(range(12))
        assert len({number for _, number in samples}) == 12
    assert orders[0] != orders[1]  # of two epochs


class Buckets:
    """A batch sampler of batches of two; ``shuffled`` by whatever generator."""

    def __init__(self, rank: int, shuffled: Callable[[Any], list[int]]) -> None:
        self.rank, self.shuffled = rank, shuffled
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.shuffled(self)[self.rank :: 3]:
            yield [2 * batch, 2 * batch + 1]


SHUFFLED: dict[str, Callable[[Any], list[int]]] = {
    "random": lambda _: random.sample(range(12), 12),
    "torch": lambda _: torch.randperm(12).tolist(),
    "numpy": lambda _: np.random.permutation(12).tolist(),
    "its own": lambda sampler: torch.randperm(12, generator=sampler.generator).tolist(),
}


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


def read(sources: Sequence[Any]) -> list[list[list[Any]]]:
    """Two epochs of four batches for each rank: by epoch and rank."""
    found = streams(sources)
    epochs = [
        [[sample for _ in range(4) for sample in stream.next()] for stream in found]
        for _ in range(2)
    ]
    for stream in reversed(found):  # the workers of each hold the queues of those before
        stream.close()
    return epochs


def streams(sources: Sequence[Any]) -> list[Stream]:
    """One for each rank."""
    found = [
        Stream(
            source, batch=None, rows=None, collate=list, seed=5, rank=rank,
            say=lambda text: None, alive=lambda: None,
        )
        for rank, source in enumerate(sources)
    ]  # fmt: skip
    for stream in found:
        stream.compare([one.own for one in found])
    return found


@pytest.mark.parametrize("by", SHUFFLED)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_all_ranks_shuffle_are_shuffled_alike(by: str, workers: int) -> None:
    """start() seeds all ranks alike. Else one would read what another does, and some nobody."""
    epochs = [
        [[index for index, _ in samples] for samples in epoch]
        for epoch in read([loader(rank, by, workers) for rank in range(3)])
    ]
    for epoch in epochs:
        assert sorted(number for samples in epoch for number in samples) == list(range(24))
    assert epochs[0] != epochs[1]


def test_ranks_that_take_no_part_of_their_own_are_told_of_whatever_they_do_to_samples() -> None:
    """Loop.compare_streams() warns by what tells their first batches apart."""
    for ranks, different in (((0, 0, 0), 1), ((0, 1, 2), 3)):
        found = streams([loader(rank, "torch", 0) for rank in ranks])
        read = [stream.next() for stream in found]
        assert len({drawn for batch in read for _, drawn in batch}) == 6
        assert len({stream.first for stream in found}) == different


def test_a_second_run_over_the_same_loader_draws_as_one_over_a_fresh_loader() -> None:
    sources = [loader(rank, "torch", 0) for rank in range(3)]
    assert read(sources) == read(sources)


def loader(rank: int, by: str, workers: int) -> DataLoader[Any]:
    sampler: Any = Buckets(rank, SHUFFLED[by])
    return DataLoader(Drawing(), batch_sampler=sampler, num_workers=workers, collate_fn=list)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_samples_draw_is_each_ranks_own_for_all_that(workers: int) -> None:
    first, _ = read([loader(rank, "torch", workers) for rank in range(3)])
    assert len({drawn for samples in first for _, drawn in samples}) == 24


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        np.random.default_rng,
        np.random.RandomState,
        random.Random,
    ],
)
def test_where_a_generator_stands_is_told_alike(make: Callable[[int], Any]) -> None:
    assert own_generators.mark(make(1)) == own_generators.mark(make(1))
    assert own_generators.mark(make(1)) != own_generators.mark(make(2))
