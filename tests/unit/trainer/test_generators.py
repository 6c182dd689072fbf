"""Generators that objects keep, or a script names: what they draw depends on the position."""

import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from ddpjob_trainer.data import generators
from ddpjob_trainer.data.fetch import Batches, BatchSettings, Work
from ddpjob_trainer.data.stream import Stream
from ddpjob_trainer.data.user_samplers import Sampled
from ddpjob_trainer.gpu import accelerator

RNG = np.random.default_rng(1)
LAZY = random.Random(1)


class Noise:
    def __init__(self, rng: Any = None) -> None:
        self.rng = rng or random.Random(1)


class Holds(Dataset[Any]):
    def __init__(self, *parts: Any) -> None:
        self.parts = [*parts]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]


class Shuffles:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(9).tolist())

    def __call__(self, samples: Sequence[Any]) -> tuple[float, float]:
        return float(self.rng.random()), float(torch.rand(()))


class Collates(Shuffles):
    def __call__(self, samples: Sequence[Any]) -> Any:
        return [*samples], super().__call__(samples)


class OfTheClass:
    rng = np.random.default_rng(1)


class OfItsBase(OfTheClass):
    pass


@dataclass(slots=True)
class Slots:
    rng: Any


class Seeds:
    seed = 0

    def reseed(self, seed: int) -> None:
        self.seed = seed


AUGMENT = Holds(Holds(Noise()))


def of_a_closure() -> Callable[[Any], list[int]]:
    rng = random.Random(1)
    return lambda _: rng.sample(range(9), 9)


def of_the_module(_: Any) -> list[int]:
    return [int(number) for number in RNG.permutation(9)]


def of_a_default(_: Any, rng: Any = np.random.default_rng(1)) -> list[int]:  # noqa: B008
    return [int(number) for number in rng.permutation(9)]


def of_its_attribute(_: Any) -> None: ...


of_its_attribute.rng = random.Random(1)  # type: ignore[attr-defined]


#: What leads to so many.
REACHED: dict[str, tuple[Callable[[], Any], int]] = {
    "its own": (Shuffles, 1),
    "compose of compose": (lambda: Holds(Holds(Holds(Noise()))), 1),
    "concat of datasets": (lambda: ConcatDataset([Holds(Holds(Noise())), Holds(Noise())]), 2),
    "twice the same": (lambda: Holds(AUGMENT, [AUGMENT], AUGMENT.parts[0]), 1),
    "in a circle": (lambda: (circle := Holds(Noise()), circle.parts.append(circle))[0], 1),
    "base of the class": (lambda: Holds(OfItsBase()), 1),
    "slots": (lambda: Holds(Slots(random.Random(1))), 1),
    "method of C": (lambda: Holds(random.Random(1).random), 1),
    "bound method": (lambda: Shuffles().__iter__, 1),
    "partial": (lambda: functools.partial(of_a_default, rng=random.Random(1)), 1),
    "namespace": (lambda: Holds(SimpleNamespace(rng=np.random.RandomState(1))), 1),
    "mappings": (lambda: Holds(OrderedDict(a=deque([{"b": random.Random(1)}]))), 1),
    "attribute of a function": (lambda: of_its_attribute, 1),
    "what a function names": (lambda: [of_a_closure(), of_the_module, of_a_default], 0),
    "reseed()": (lambda: Holds(Seeds()), 1),
    "a library's": (lambda: [random.shuffle, torch.utils.data.default_collate], 0),
    "a list of samples": (lambda: Holds([Noise() for _ in range(1000)]), 0),
}


def test_they_are_found_where_datasets_and_transforms_keep_them():
    for case, (make, wanted) in REACHED.items():
        found = generators.found_in(make())
        assert len({id(one) for one in found}) == len(found) == wanted, case


class Odd:
    """What must not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is asked for")

    @property
    def __class__(self) -> Any:
        raise AssertionError("the class is asked for")


def test_a_search_ends_whatever_it_is_given_and_runs_no_script_code():
    assert generators.found_in(Holds(Odd())) == []
    nodes: list[Any] = [SimpleNamespace(near=[]) for _ in range(50_000)]
    for number, node in enumerate(nodes):
        node.near = [nodes[(number * 7 + more) % len(nodes)] for more in range(12)]
    source = Holds(nodes[0], Noise())
    assert generators.found_in(source) == [source.parts[1].rng]


def test_those_named_are_seeded_too_each_once():
    own, other = Noise(), Seeds()
    found = generators.found_in(Holds(own), [own.rng, other])
    assert found == [own.rng, other]
    draws = []
    for key in (1, 1, 2**64 - 1):
        generators.seed(found, key)
        draws.append((own.rng.random(), other.seed))
    assert draws[0] == draws[1]
    assert len({*draws}) == 2
    assert all(0 < seed < 2**32 for _, seed in draws)  # as numpy takes it


@pytest.mark.parametrize(("make", "named"), [(Shuffles, []), (lambda: of_the_module, [RNG])])
def test_a_sampler_gives_an_epoch_the_same_order_whatever_came_before(make, named):
    def last_of(*epochs: int) -> list[int]:
        order = Sampled(5, make(), 9, named)
        return [order.samples(epoch, np.arange(9)).tolist() for epoch in epochs][-1]

    assert last_of(0, 1, 2) == last_of(2) != last_of(1)


def made(batches: Batches, *positions: int) -> Any:
    return batches.make(Work(np.array(positions), np.array(positions)))


class Own(Dataset[float]):
    """Draws from two that it keeps, a global and one in a list of samples, which are not found."""

    def __init__(self) -> None:
        self.first, self.second = torch.Generator(), np.random.RandomState(1)
        self.samples = [Noise() for _ in range(200)]

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[float, ...]:
        first = float(torch.rand((), generator=self.first))
        return first, float(self.second.random()), LAZY.random(), self.samples[0].rng.random()


def test_draws_from_own_and_named_generators_depend_on_the_position_only():
    def of(*, named: bool) -> list[list[tuple[float, ...]]]:
        dataset = Own()
        batches = Batches(dataset, list, 5, [LAZY, dataset.samples[0].rng] if named else ())
        return [made(batches, 3, 4), made(batches, 3, 4)]

    first, again = of(named=True)
    assert first == again
    assert len({number for sample in first for number in sample}) == 8, "no two draw the same"
    first, again = of(named=False)
    assert [sample[:2] for sample in first] == [sample[:2] for sample in again]
    assert {*first[0][2:]}.isdisjoint(again[0][2:])
    collating, other = (Batches([1, 2, 3, 4], Shuffles(), 5) for _ in range(2))
    made(collating, 0, 1)
    assert made(collating, 2, 3) == made(other, 2, 3) != made(other, 0, 1)
    # For ever: a run that goes on from a snapshot of an older version draws the same.
    drawn = made(Batches(Own(), list, 5, [LAZY]), 7)[0][:3]
    assert drawn == (0.760242223739624, 0.05085309319344833, 0.4869488051299452)


def stream(source: Any, rank: int = 0, batch: int | None = None, collate: Any = list) -> Stream:
    place = BatchSettings(
        seed=5, rank=rank, ranks=3, global_batch=3 * (batch or 1), parts=3, level="resume",
        tail="drop", collate=collate, accelerator=accelerator.of(torch.device("cpu")),
        say=lambda text: None, alive=lambda: None,
    )  # fmt: skip
    return Stream(source, place, batched=batch is None)


class Sharded(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rng, self.noise = random.Random(7), np.random.default_rng(rank)

    def __iter__(self) -> Iterator[Any]:
        files = list(range(12))
        self.rng.shuffle(files)
        for file in files[self.rank :: 3]:
            yield file, float(self.noise.random())


def test_a_stream_that_is_read_again_gives_what_it_gave():
    def opened() -> Stream:
        return stream(Sharded(0), batch=2, collate=Collates())

    before = opened()
    for _ in range(3):
        before.read()  # the third is of its second epoch
    state, wanted = before.state_dict(), before.read()
    after = opened()
    after.load_state_dict(state)
    assert after.read() == wanted


def test_what_all_ranks_shuffle_alike_they_still_do():
    """Else some files would be read by two of them, and others by none."""
    found = streams([Sharded(rank) for rank in range(3)], batch=4)
    orders = []
    for _ in range(2):
        samples = [sample for one in found for sample in one.read()]
        orders.append([file for file, _ in samples])
        assert sorted(orders[-1]) == list(range(12))
        assert len({number for _, number in samples}) == 12
    assert orders[0] != orders[1]  # of two epochs


class Buckets:
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


def streams(sources: Sequence[Any], **options: Any) -> list[Stream]:
    found = [stream(source, rank, **options) for rank, source in enumerate(sources)]
    for one in found:
        one.compare([other.own for other in found])
    return found


def read(sources: Sequence[Any]) -> list[list[list[Any]]]:
    found = streams(sources)
    epochs = [
        [[sample for _ in range(4) for sample in one.read()] for one in found] for _ in range(2)
    ]
    for one in reversed(found):  # the workers of each hold the queues of those before
        one.close()
    return epochs


def loader(rank: int, by: str, workers: int = 0) -> DataLoader[Any]:
    sampler: Any = Buckets(rank, SHUFFLED[by])
    return DataLoader(Drawing(), batch_sampler=sampler, num_workers=workers, collate_fn=list)


@pytest.mark.parametrize(("by", "workers"), [*((by, 0) for by in SHUFFLED), ("torch", 2)])
def test_batches_that_all_ranks_shuffle_are_shuffled_alike(by, workers):
    """start() seeds all ranks alike. Else one would read what another does, and some nobody."""
    sources = [loader(rank, by, workers) for rank in range(3)]
    epochs = read(sources)
    orders = [[index for samples in epoch for index, _ in samples] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(24))] * 2
    assert orders[0] != orders[1]
    drawn = {number for samples in epochs[0] for _, number in samples}
    assert len(drawn) == 24, "each rank's own for all that"
    assert workers or read(sources) == epochs, "in a second run over the same loaders"


def test_ranks_that_read_the_same_part_are_found_by_their_first_batches():
    """Loop.compare_streams() warns by what tells their first batches apart."""
    for ranks, different in (((0, 0, 0), 1), ((0, 1, 2), 3)):
        found = streams([loader(rank, "torch") for rank in ranks])
        read = [one.read() for one in found]
        assert len({drawn for batch in read for _, drawn in batch}) == 6
        assert len({one.first for one in found}) == different


def test_where_a_generator_stands_is_told_alike():
    of_torch: Callable[[int], Any] = lambda seed: torch.Generator().manual_seed(seed)  # noqa: E731
    for make in (of_torch, np.random.default_rng, np.random.RandomState, random.Random):
        marks = [generators.mark(make(seed)) for seed in (1, 1, 2)]
        assert marks[0] == marks[1] != marks[2]
