"""The tree of shards: any way to share them among ranks gives the same bits."""

import random
import struct
from itertools import pairwise
from operator import add

import pytest

from ddpjob_trainer.gradients import tree_reduce
from ddpjob_trainer.gradients.tree_reduce import Node, Partial

COUNTS = [1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 31, 64]


def bits(value: float) -> bytes:
    return struct.pack("d", value)


def numbers(count: int, seed: int) -> list[float]:
    """Of very different sizes, so that nearly every order of additions gives other bits."""
    draw = random.Random(seed)
    return [draw.gauss(0, 1) * 10.0 ** draw.randint(-8, 8) for _ in range(count)]


def over_ranks(values: list[float], ranges: list[range]) -> float:
    count = len(values)
    known: dict[Node, float] = {}
    for mine in ranges:
        partial: Partial[float] = Partial(count, add)
        for shard in mine:
            partial.push(shard, values[shard])
        sums = partial.take()
        assert [node for node, _ in sums] == list(tree_reduce.subtrees(Node(0, count), mine))
        assert len(sums) <= 2 * count.bit_length()
        known |= dict(sums)
    return tree_reduce.tree_sum(Node(0, count), known, add)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.tier("gate")
def test_any_contiguous_split_gives_the_same_bits(count):
    draw = random.Random(count)
    other = sum(tree_reduce.total(numbers(8, seed)) != sum(numbers(8, seed)) for seed in range(50))
    assert other > 10, "the order matters, or this proves nothing"
    for seed in range(20):
        values = numbers(count, seed)
        expected = bits(tree_reduce.total(values))
        splits = [
            [tree_reduce.owned(count, n, rank) for rank in range(n)] for n in range(1, count + 1)
        ]
        for _ in range(20):
            cuts = [0, *sorted(draw.randint(0, count) for _ in range(3)), count]
            splits.append([range(a, b) for a, b in pairwise(cuts)])
        for split in splits:
            assert bits(over_ranks(values, split)) == expected


def test_the_tree_is_fixed_for_ever():
    """Another tree would silently break every resume over an upgrade."""

    def shape(node: Node) -> object:
        if node.end - node.start == 1:
            return node.start
        return tuple(shape(half) for half in tree_reduce.halves(node))

    assert shape(Node(0, 8)) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert shape(Node(0, 6)) == (((0, 1), (2, 3)), (4, 5))
    assert shape(Node(0, 3)) == ((0, 1), 2)


def test_ranks_own_all_shards_in_order_and_differ_by_one():
    for count in COUNTS:
        for ranks in range(1, count + 1):
            parts = [tree_reduce.owned(count, ranks, rank) for rank in range(ranks)]
            assert [shard for part in parts for shard in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            for mine in parts if count == 8 and ranks in (1, 2, 4, 8) else ():  # a subtree each
                assert list(tree_reduce.subtrees(Node(0, 8), mine)) == [(mine.start, mine.stop)]


def test_one_sum_per_level_is_held_and_a_missing_part_is_an_error():
    partial: Partial[float] = Partial(64, add)
    for shard in range(64):
        partial.push(shard, 1.0)
        assert len(partial._sums) <= 6
    assert partial.take() == [(Node(0, 64), 64.0)]
    assert partial.take() == []
    with pytest.raises(KeyError):
        tree_reduce.tree_sum(Node(0, 2), {Node(0, 1): 1.0}, add)
