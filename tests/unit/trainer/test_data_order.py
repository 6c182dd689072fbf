"""Data order: a keyed permutation in O(1), and the other orders, position by position."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ddpjob_trainer.data.order import (
    DataOrder,
    Permutation,
    Sequential,
    Shuffled,
    Weighted,
    key64,
    share,
    steps_per_epoch,
)
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.manager import compare_configs

#: In standard deviations. The numbers are fixed, so this never fails by chance.
FAR = 4.0


def permuted(key: int, length: int) -> np.ndarray:
    return Permutation(key, length)(np.arange(length))


def deviation(counts: np.ndarray, freedom: int) -> float:
    expected = counts.mean()
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def batch(order: DataOrder, step: int) -> list[int]:
    return order.samples(order.batch(step)).tolist()


def test_the_order_is_fixed_for_ever():
    """A changed permutation would silently break every resume over an upgrade: see VERSION."""
    assert Shuffled(7, 10).samples(0, np.arange(10)).tolist() == [5, 1, 4, 7, 3, 9, 2, 6, 8, 0]
    places = np.array([0, 1, 2, 1023, 1024, 29_999_999])
    assert Shuffled(7, 30_000_000).samples(3, places).tolist() == [
        28182663, 27780747, 18922063, 7064136, 17644664, 14869601,
    ]  # fmt: skip


def test_every_length_is_permuted():
    for length in (*range(1, 40), 1023, 1024, 1025, 1026, 4096, 4097, 99_991):
        assert np.array_equal(np.sort(permuted(5, length)), np.arange(length)), length


@pytest.mark.parametrize("length", [100, 1000, 1025, 1500])
def test_every_sample_is_equally_frequent_at_every_place_and_after_others(length):
    places, steps = np.zeros((length, length)), np.zeros(length)
    for number in range(800):
        found = permuted(key64(number), length)
        places[np.arange(length), found] += 1
        steps += np.bincount(np.diff(found) % length, minlength=length)
    assert abs(deviation(places, (length - 1) ** 2)) < FAR
    assert abs(deviation(steps[1:], length - 2)) < FAR


def test_an_epoch_of_any_length_costs_nothing():
    order = DataOrder(Shuffled(7, 2**40), 96)
    tracemalloc.start()
    for step in (0, 10**6, 2**35):
        found = order.samples(order.batch(step))
        assert len(set(found.tolist())) == 96
        assert found.max() < 2**40
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_asking_for_a_few_places_gives_what_asking_for_all_gives():
    order = Shuffled(3, 5000)
    whole = order.samples(1, np.arange(5000))
    for places in ([0], [1023, 1024], [17, 4999], [3000, 3001], [4999, 0]):
        assert order.samples(1, np.array(places)).tolist() == whole[places].tolist()
    assert order.samples(2, np.arange(5000)).tolist() != whole.tolist()
    assert Shuffled(4, 5000).samples(1, np.arange(5000)).tolist() != whole.tolist()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 12])
def test_shards_partition_each_batch_and_batches_an_epoch(shards):
    order = DataOrder(Shuffled(3, 100), 12)
    assert order.steps_per_epoch == 8
    seen: list[int] = []
    for step in range(8):
        parts = [share(order.batch(step), shard, shards) for shard in range(shards)]
        assert np.concatenate(parts).tolist() == order.batch(step).tolist()
        assert np.concatenate([order.samples(p) for p in parts]).tolist() == batch(order, step)
        seen += batch(order, step)
    assert len(set(seen)) == 96  # no sample twice; four are left for other epochs
    assert batch(order, 8) != batch(order, 0)


def test_positions_count_a_runs_samples_in_any_order_of_the_dataset():
    order = DataOrder(Shuffled(3, 10), 4)
    assert [order.batch(step).tolist() for step in (2, 3)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    found = [batch(DataOrder(Sequential(10), 4), step) for step in range(3)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_steps_per_epoch_takes_a_dataset_or_its_length():
    assert steps_per_epoch(range(10), 4) == steps_per_epoch(10, 4) == 2
    assert steps_per_epoch(np.int64(10), 4, "pad") == 3
    loader = DataLoader(list(range(10)), batch_size=4)  # its length is of batches
    for samples, size, words in (
        (5, 6, "fewer than global_batch=6"),
        (50, 0, "global_batch=0 must be at least 1"),
        (loader, 4, "give it the DataLoader's dataset"),
    ):
        with pytest.raises(ConfigError, match=words):
            steps_per_epoch(samples, size)


def test_a_snapshot_of_another_order_is_refused():
    made: dict[str, Any] = dict.fromkeys(("seed", "global_batch", "samples", "tail", "level"), 1)
    mine = {**made, "order": Shuffled(7, 10).name}
    with pytest.raises(ConfigError, match=r"order=sequential, now it is shuffled/2.*data order"):
        compare_configs({**made, "order": "sequential"}, mine, 1, ())
    compare_configs(mine, mine, 1, ())


def test_samples_are_drawn_by_their_weights_which_the_order_is_named_after():
    weights = [0.0, 1.0, 3.0, 0.0, 4.0, 0.0]
    order = Weighted(7, weights)
    assert order.length == 6
    places = np.arange(60_000)
    counts = np.bincount(order.samples(0, places), minlength=6)
    expected = 60_000 * np.array(weights) / 8
    assert counts[expected == 0].sum() == 0
    drawn = expected > 0
    assert ((counts - expected)[drawn] ** 2 / expected[drawn]).sum() < 14  # 2 degrees: p < 0.001
    assert order.samples(1, places).tolist() != order.samples(0, places).tolist()
    assert order.samples(0, places[500:510]).tolist() == order.samples(0, places)[500:510].tolist()
    assert Weighted(7, [1, 2]).name == Weighted(8, [1.0, 2.0]).name != Weighted(7, [2, 1]).name
    for weights in ([], [0, 0], [1, -1], [1, math.nan], [[1, 2]], [1, math.inf], ["1", "x"]):
        with pytest.raises(ConfigError, match="weights must be one finite number per sample"):
            Weighted(7, weights)
