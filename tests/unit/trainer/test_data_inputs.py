"""What run.steps() takes, and that a batch depends on its position only."""

import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from ddpjob_trainer.data.fetch import Batches, BatchSettings, Work, dying_with_parent
from ddpjob_trainer.data.inputs import Indexed, InputOptions, open_input
from ddpjob_trainer.data.order import Sequential, Shuffled, Weighted
from ddpjob_trainer.data.stream import Stream
from ddpjob_trainer.data.user_samplers import Sampled
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import accelerator

SAMPLES = 20


def place(**changed: Any) -> BatchSettings:
    usual: dict[str, Any] = {
        "seed": 5, "rank": 0, "ranks": 2, "global_batch": 8, "parts": 2, "level": "resume",
        "tail": "drop", "collate": None, "accelerator": accelerator.of(torch.device("cpu")),
        "say": lambda text: None, "alive": lambda: None,
    }  # fmt: skip
    return BatchSettings(**{**usual, **changed})


def opened(source: Any, at: BatchSettings | None = None, **options: Any) -> Any:
    asked = {one.name: one.default for one in fields(InputOptions)} | options
    return open_input(source, InputOptions.among(asked), at or place())


class Noisy(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "drawn": [torch.rand(()).item(), np.random.rand(), random.random()]}


def batches(source: Any, *parts: tuple[list[int], list[int]], seed: int = 5) -> list[Any]:
    made = Batches(source, list, seed)
    return [made.make(Work(np.array(samples), np.array(at))) for samples, at in parts]


def test_what_a_sample_draws_depends_on_the_seed_and_its_position_only():
    parts = ([3, 4, 3], [10, 11, 12]), ([3], [10]), ([4, 3], [11, 12])
    whole, left, right = batches(Noisy(), *parts)
    assert whole == left + right
    drawn = [tuple(sample["drawn"]) for sample in whole]
    assert len(set(drawn)) == 3  # also for sample 3 when it comes again
    other = batches(Noisy(), parts[0], seed=6)[0]
    again = {number for sample in other for number in sample["drawn"]}
    assert not any(again & set(sample) for sample in drawn)


class Flipped(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        assert isinstance(index, int)
        return -super().__getitem__(index)[0]


X, ZEROS = torch.arange(4), TensorDataset(torch.zeros(4))


def test_only_what_may_draw_is_seeded(monkeypatch):
    seeded: list[int] = []
    monkeypatch.setattr("ddpjob_trainer.data.generators.seed_generators", seeded.append)
    for source in (ZEROS, Subset(ZEROS, [1, 2]), ConcatDataset([ZEROS, [1]]), [1, 2, 3]):
        made = Batches(source, None, 5)
        made.make(Work(np.array([0]), np.array([0])))
        assert (made.draws, seeded) == (False, [])
    for source in (Noisy(), ConcatDataset([[1], Noisy()]), Subset(Noisy(), [1]), Flipped(X)):
        made = Batches(source, None, 5)
        made.make(Work(np.array([0]), np.array([0])))
        assert made.draws
        assert seeded.pop()
    assert made.make(Work(np.array([1, 3]), np.array([0, 1]))).tolist() == [-1, -3]


def test_subsets_and_getitems_give_the_samples_they_name():
    class Many(Noisy):
        def __getitems__(self, wanted: list[int]) -> list[int]:
            return wanted

    for source in (Many(), Subset(Many(), range(5, 20)), Subset(Subset(Many(), range(20)), [9, 4])):
        found = Batches(source, list, 5).make(Work(np.array([1, 0]), np.array([0, 1])))
        subset = {20: [1, 0], 15: [6, 5], 2: [4, 9]}
        assert found == subset[len(source)]


def order_of(sampler: Any, epoch: int = 0, samples: int = SAMPLES) -> list[int]:
    order = Sampled(5, sampler, samples)
    return order.samples(epoch, np.arange(order.length)).tolist()


def test_a_sampler_is_a_function_of_seed_and_epoch():
    for generator in (None, torch.Generator().manual_seed(9)):
        sampler = RandomSampler(range(SAMPLES), generator=generator)
        before = torch.get_rng_state()
        first, second = order_of(sampler), order_of(sampler, 1)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert (order_of(sampler), order_of(sampler, 1)) == (first, second)
        assert sorted(first) == sorted(second) == list(range(SAMPLES))
        assert first != second


class Epochs:
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.epoch


def test_an_order_may_be_a_list_an_array_or_a_function_of_the_epoch():
    assert order_of([3, 1, 1]) == order_of(np.array([3, 1, 1])) == order_of(torch.tensor([3, 1, 1]))
    assert order_of(lambda epoch: [epoch, 7], 4) == [4, 7]
    assert order_of(Epochs(), 3) == [3, 3]  # told the epoch, and read as far as it is long
    assert Sampled(5, [1, 2], 3).name != Sampled(5, [2, 1], 3).name


def test_orders_that_cannot_be_are_refused():
    for sampler, words in (
        ([0, SAMPLES], "indices from 0 to 20 for epoch 0, but the dataset has 0 to 19"),
        ([-1, 2], "indices from -1"),
        (BatchSampler(range(SAMPLES), 4, False), "a batch sampler has no place here"),
        ([0.5, 1.5], "must give the index of one sample after another"),
        (iter([1, 2]), "list_iterator has no length"),
        (DistributedSampler(list(range(SAMPLES)), 2, 0), "give a sampler of the whole dataset"),
        ([], "the dataset is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            opened(Noisy(), sampler=sampler)
    with pytest.raises(ConfigError, match="gave 3 indices for epoch 2 and 1 for epoch 0"):
        order_of(lambda epoch: [0] * (epoch + 1), 2)


def loader(**options: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, **options)


def test_a_dataloader_is_taken_apart_into_its_order():
    for source, kind in (
        (loader(shuffle=True), Shuffled),
        (loader(), Sequential),
        (loader(sampler=DistributedSampler(Noisy(), 2, 1)), Shuffled),
        (loader(sampler=DistributedSampler(Noisy(), 2, 1, shuffle=False)), Sequential),
        (loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)), Weighted),
        (loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, 8)), Sampled),
        (loader(sampler=RandomSampler(Noisy(), replacement=True)), Sampled),
        (loader(sampler=Epochs()), Sampled),
    ):
        found = opened(source, place(tail="pad"))
        assert isinstance(found, Indexed)
        assert isinstance(found.order.epochs, kind)


class Balanced(DistributedSampler[Any]):
    """A subclass, as Catalyst's wrapper and many of one's own: it decides itself what is drawn."""

    def __iter__(self) -> Iterator[int]:
        return iter([0] * self.num_samples)


def test_a_sampler_of_another_class_is_not_taken_for_a_shuffle():
    sampler = Balanced(Noisy(), 2, 1)
    for source, options in ((loader(sampler=sampler), {}), (Noisy(), {"sampler": sampler})):
        with pytest.raises(ConfigError, match=r"Balanced is a DistributedSampler.*weights="):
            opened(source, **options)


class Zeros(DataLoader[Any]):
    """Changes its batches on their way, as loaders that prefetch to a GPU do."""

    def __iter__(self) -> Any:
        return (batch["index"] * 0 for batch in super().__iter__())


class Own(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter(Zeros(self.dataset, 4))


class Fixed(DataLoader[Any]):
    """As PyTorch Geometric's: torch's code with another collate_fn."""

    def __init__(self) -> None:
        super().__init__(Noisy(), 4, collate_fn=list)

    def of_mine(self) -> None: ...


def test_a_dataloader_that_walks_its_batches_itself_is_read_as_it_is():
    for kind in (Zeros, Own):
        found = opened(kind(Noisy(), 4))
        assert isinstance(found, Stream)
        assert taken(found, 6) == [[0] * 4] * 6
    assert isinstance(opened(Fixed()), Indexed)


def test_the_sampler_of_a_dataloader_read_as_it_is_gets_the_epoch():
    sampler: Any = DistributedSampler(Noisy(), 2, 1)

    class Indices(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch["index"] for batch in super().__iter__())

    for source in (
        Indices(Noisy(), 4, sampler=sampler),
        Indices(Noisy(), batch_sampler=BatchSampler(sampler, 4, True)),
    ):
        rows = taken(opened(source, place(global_batch=8)), 4)
        sampler.set_epoch(1)
        assert rows[2:] == [batch["index"].tolist() for batch in [*loader(sampler=sampler)][:2]]
        assert rows[:2] != rows[2:]


def test_a_dataloader_says_how_it_is_read():
    def start(number: int) -> None: ...

    source = loader(num_workers=2, prefetch_factor=5, worker_init_fn=start, collate_fn=list)
    found = opened(source)
    asked = {"num_workers": 2, "prefetch_factor": 5, "worker_init_fn": start}
    assert asked.items() <= found._options.items()
    made = found.next(0, 0, np.arange(4))
    assert [sample["index"] for sample in made] == [0, 1, 2, 3]
    assert made == batches(Noisy(), ([0, 1, 2, 3], [0, 1, 2, 3]))[0]


class Counting(IterableDataset[int]):
    """Yields numbers, and what it has drawn so far: as a shuffle buffer, it remembers."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        drawn = 0.0
        for number in range(self.length):
            drawn += random.random()
            yield torch.tensor([number, drawn], dtype=torch.float64)


class Kept(Counting):
    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield torch.tensor([self.at - 1, random.random()], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Anything:
    def __iter__(self) -> Iterator[Any]:
        return iter(Counting())


def test_what_cannot_be_read_is_refused_with_the_cure():
    again = DataLoader(Counting(), batch_size=4, num_workers=1, persistent_workers=True)
    for source, options, at, words in (
        (loader(), {"workers": 2}, {}, "workers is the DataLoader's own"),
        (loader(), {"shuffle": True}, {}, "shuffle is the DataLoader's own"),
        (DataLoader(Noisy(), batch_size=3), {}, {}, "batch_size=3 must be 4: global_batch=8 in 2"),
        (DataLoader(Counting(), batch_size=3), {}, {}, "batch_size=3 must be 4"),
        (Noisy(), {"workers": -1}, {}, "workers=-1 must be at least 0"),
        (Noisy(), {"prefetch": 0}, {}, "prefetch=0 must be at least 1"),
        (Noisy(), {"shuffle": False, "weights": [1]}, {}, "shuffle and weights each decide"),
        (Noisy(), {"weights": [1, 2]}, {}, "there are 2 weights for 20 samples"),
        (Noisy(), {"batched": True}, {}, "batched=True is for streams"),
        (Counting(), {"workers": 2}, {}, "workers is for map-style datasets"),
        (Noisy(), {"generators": [random]}, {}, "generators must be a list of generators of torch"),
        (Noisy(), {"generators": torch.Generator()}, {}, "generators must be a list"),
        (Counting(), {"shuffle": True}, {}, "shuffle is for map-style datasets"),
        (Counting(), {}, {"level": "elastic"}, "level='elastic' cannot share out Counting"),
        (Counting(), {}, {"tail": "pad"}, "tail='pad' needs to know"),
        (Anything(), {}, {}, "say batched=True if batches, batched=False if samples"),
        (7, {}, {}, "int is not a map-style dataset"),
        (again, {}, {}, "use persistent_workers=False"),
    ):
        with pytest.raises(ConfigError, match=words):
            opened(source, place(**at), **options)


def taken(found: Stream, count: int, *, first: int = 0) -> list[Any]:
    steps = range(first, first + count)
    return [found.next(step, 0, np.arange(4)).tolist() for step in steps]


STREAMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "samples": (Counting, {}),
    "samples with state": (Kept, {}),
    "a loader": (lambda: DataLoader(Counting(), batch_size=4), {}),
    "a loader of what has state": (lambda: DataLoader(Kept(), batch_size=4), {}),
    "anything": (Anything, {"batched": False}),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_stream_goes_on_from_its_state_as_if_nothing_had_been(kind, stop):
    make, options = STREAMS[kind]
    whole = taken(opened(make(), **options), 7)
    assert [round(batch[0][0]) for batch in whole] == [0, 4, 0, 4, 0, 4, 0]  # 8 and 9 are dropped
    before = opened(make(), **options)
    assert taken(before, stop) == whole[:stop]
    state = before.stream.state_dict()
    told: list[str] = []
    after = opened(make(), place(say=told.append), **options)
    after.stream.load_state_dict(state)
    after.begin(range(stop, 7), lambda step: [])
    assert taken(after, 7 - stop, first=stop) == whole[stop:]
    assert after.epoch(7) == 3
    again = "state" not in kind
    assert bool(told) == again
    if again:
        assert "batches of epoch" in told[0]


class Endlessly(IterableDataset[Any]):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.item


X4, Y4 = torch.zeros(4, 3), torch.zeros(4)


@pytest.mark.parametrize(
    "item",
    [
        (X4, Y4),
        X4,
        {"x": X4, "y": Y4},
        [X4, (Y4, "a")],
        (torch.zeros(9, 3), np.zeros(9)),
        (torch.zeros(9, 3), torch.zeros(9, 1)),
        {"ids": X4, "labels": X4, "epoch": 3},
        (torch.zeros(9, 3, 2), torch.zeros(9, 5)),
    ],
)
def test_a_stream_whose_items_may_be_batches_is_asked_about(item):
    with pytest.raises(ConfigError, match=r"Endlessly yields samples or batches: .* with \d rows"):
        opened(Endlessly(item)).next(0, 0, np.arange(4))
    opened(Endlessly(item), batched=True).next(0, 0, np.arange(4))
    opened(Endlessly(item), place(collate=list)).next(0, 0, np.arange(4))
    made = opened(Endlessly((X4, Y4)), batched=False).next(0, 0, np.arange(4))
    assert made[0].shape == (4, 4, 3)


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(4),
        torch.zeros(3, 8, 8),
        (torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)),
        (torch.zeros(3, 8, 8), 5),
        (torch.zeros(1, 8, 8), torch.zeros(1)),
        (X4, torch.tensor(5)),
        {"input_ids": torch.zeros(128), "labels": torch.zeros(128), "name": "a"},
        7,
        "text",
    ],
)
def test_a_stream_of_samples_is_not(item):
    opened(Endlessly(item)).next(0, 0, np.arange(4))


def test_a_stream_that_yields_nothing_is_refused():
    for source in (Counting(0), Counting(3)):
        with pytest.raises(ConfigError, match="has no whole batch for this process in epoch 0"):
            opened(source).next(0, 0, np.arange(4))
    once = opened(iter(Counting(4)), batched=False)
    once.next(0, 0, np.arange(4))
    with pytest.raises(ConfigError, match="can be read only once"):
        once.next(1, 0, np.arange(4))


def test_a_stream_of_another_place_or_kind_is_refused():
    before = opened(Kept())
    taken(before, 2)
    after = opened(Kept())
    after.stream.load_state_dict(before.stream.state_dict())
    with pytest.raises(ConfigError, match="should have given 3 batches"):
        after.begin(range(3, 7), lambda step: [])
    with pytest.raises(ConfigError, match="Counting has no state_dict"):
        opened(Counting()).stream.load_state_dict(before.stream.state_dict())
    after = opened(Counting())  # with other data allowed it begins anew
    after.begin(range(3, 7), lambda step: [], fresh=True)
    assert [round(batch[0][0]) for batch in taken(after, 3, first=3)] == [0, 4, 0]
    assert after.stream.state_dict()["total"] == 6


def test_batches_that_are_not_whole_or_not_asked_for_are_passed_over():
    rows = torch.zeros(7, 4, 3)  # time comes first
    found = opened(DataLoader([rows, rows[:, :3]], batch_size=None), batched=True)
    found.stream._rows = 4
    assert [found.next(step, 0, np.arange(4)).shape for step in (0, 1)] == [(7, 4, 3)] * 2
    found = opened(Counting(40))
    whole = taken(opened(Counting(40)), 5)
    assert taken(found, 1) + taken(found, 1, first=3) == [whole[0], whole[3]]


def test_workers_give_what_this_process_would_and_skip_what_is_not_asked():
    here, there = opened(Noisy()), opened(Noisy(), workers=2)

    def plan(step: int) -> list[np.ndarray]:
        return [np.arange(4) + 8 * step]

    before = torch.get_rng_state(), random.getstate()
    there.start()
    there.begin(range(1, 6), plan)
    found = [there.next(step, 0, plan(step)[0]) for step in (1, 2, 5)]
    assert (torch.equal(torch.get_rng_state(), before[0]), random.getstate()) == (True, before[1])
    there.close()
    for batch, step in zip(found, (1, 2, 5), strict=True):
        wanted = here.next(step, 0, plan(step)[0])
        assert batch["index"].tolist() == wanted["index"].tolist()
        assert [drawn.tolist() for drawn in batch["drawn"]] == [d.tolist() for d in wanted["drawn"]]


@pytest.fixture
def start_method():
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method("fork", force=True)


@pytest.mark.tier("gate")
def test_workers_start_by_a_fork_server_where_that_is_pythons_default(start_method):
    """As from Python 3.14 on: their parent is that server, which they must not take for a loss."""
    start_method("forkserver")
    there = opened(Noisy(), workers=2)
    there.start()
    there.begin(range(1, 2), lambda _: [np.arange(4)])
    assert len(there.next(1, 0, np.arange(4))["index"]) == 4
    there.close()


def test_a_script_may_choose_how_processes_start_after_its_workers_exist(start_method):
    start_method(None)
    dying_with_parent(None)
    assert multiprocessing.get_start_method(allow_none=True) is None
    begin = dying_with_parent(None, multiprocessing.get_context("forkserver"))
    assert begin.args[0] is None  # type: ignore[attr-defined]


def test_the_users_code_in_a_worker_finds_its_own_dataset():
    class Named(Noisy):
        name = ""

        def __getitem__(self, index: int) -> Any:
            return self.name

    def init(number: int) -> None:
        get_worker_info().dataset.name = "mine"  # type: ignore[union-attr]

    there = opened(DataLoader(Named(), 4, num_workers=1, worker_init_fn=init, collate_fn=list))
    there.start()
    there.begin(range(1), lambda step: [np.arange(4)])
    assert there.next(0, 0, np.arange(4)) == ["mine"] * 4
    there.close()


def test_a_dataset_that_changes_its_length_is_refused_at_the_next_epoch():
    data = [torch.tensor(float(number)) for number in range(SAMPLES)]
    source = opened(data)  # two steps an epoch
    source.begin(range(4), lambda step: [])
    source.next(0, 0, np.arange(4))
    data.append(torch.zeros(()))
    source.next(1, 0, np.arange(8, 12))
    with pytest.raises(ConfigError, match=r"had 20 samples .* has 21 in epoch 1.*sampler="):
        source.next(2, 0, np.arange(16, 20))
