"""Steps that share an exchange: how many, and that each gets its own sums."""

from __future__ import annotations

import pytest
import torch

from ddpjob_trainer.comm.exchange import MOST_STEPS, PATIENCE_SECONDS, Exchange
from ddpjob_trainer.comm.world import World


class Steps:
    """Makes steps of a given length on a rank of its own world; counts those of each exchange."""

    def __init__(self) -> None:
        world = World(0, 1, 0, torch.device("cpu"), None, None, None)  # type: ignore[arg-type]
        self.now = 50.0
        self.exchange = Exchange(world, clock=lambda: self.now)
        self.shared: list[int] = []

    def make(self, seconds: float, *, forced: bool = False) -> None:
        self.exchange.add([seconds])
        self.now += seconds
        if self.exchange.due or forced:
            self.exchange.start([])
            self.shared.append(len(self.exchange.finish().rows))

    def count(self, steps: int, seconds: float) -> list[int]:
        self.shared.clear()
        for _ in range(steps):
            self.make(seconds)
        return self.shared


def test_short_steps_share_more_and_more_of_them():
    assert Steps().count(63, 0.001) == [1, 2, 4, 8, 16, 16, 16]
    assert MOST_STEPS == 16


@pytest.mark.parametrize(("seconds", "share"), [(0.1, 4), (0.2, 2), (0.3, 1), (60.0, 1)])
def test_all_that_share_one_fit_into_the_patience(seconds, share):  # type: ignore[no-untyped-def]
    shared = Steps().count(64, seconds)
    assert shared[-1] == share == max(shared)
    assert share == 1 or share * seconds <= PATIENCE_SECONDS


def test_a_long_step_is_followed_by_an_exchange_of_its_own():
    steps = Steps()
    steps.count(31, 0.001)
    for _ in range(15):
        steps.make(0.001)
    steps.make(30.0)  # an evaluation, say
    steps.shared.clear()
    steps.make(30.0)
    steps.make(0.001)
    assert steps.shared == [1, 1]


@pytest.mark.parametrize("period", range(1, 40))
def test_no_exchange_is_held_up_by_more_than_one_long_step_that_comes_regularly(period):  # type: ignore[no-untyped-def]
    steps, within, most = Steps(), 0, 0
    for number in range(1, 400):
        long = number % period == 0
        told = len(steps.shared)
        steps.make(10.0 if long else 0.001)
        within += long
        if len(steps.shared) > told:
            most, within = max(most, within), 0
    assert most == 1


def test_one_that_is_sent_early_for_a_snapshot_does_not_slow_down_the_rest():
    steps = Steps()
    for number in range(1, 100):
        steps.make(0.001, forced=number % 3 == 0)
    assert steps.shared[-5:] == [3, 3, 3, 3, 3]


def test_each_step_gets_its_own_sums_and_the_head_comes_once():
    exchange = Steps().exchange
    exchange.add([1.0, 2.0])
    exchange.add([3.0, 4.0])
    exchange.start([5.0, 6.0, 7.0])
    assert exchange.under_way
    assert exchange.wait() == exchange.wait() == exchange.finish()
    assert not exchange.under_way
    exchange.add([8.0, 9.0])
    exchange.start([])
    sums = exchange.finish()
    assert (sums.head, sums.rows) == ([], [[8.0, 9.0]])
    exchange.start([1.0])
    sums = exchange.finish()
    assert (sums.head, sums.rows) == ([1.0], [])


def test_what_steps_share_is_left_alone_until_the_next_step_has_ended():
    exchange = Steps().exchange
    exchange.add([1.0])
    assert not exchange.ripe
    exchange.start([])
    assert exchange.ripe, "a long step's own"
    exchange.finish()
    exchange.add([2.0])
    exchange.add([3.0])
    exchange.start([])
    assert not exchange.ripe
    assert not exchange.newer
    exchange.add([4.0])
    assert exchange.ripe
    assert exchange.newer
    assert exchange.finish().rows == [[2.0], [3.0]]
    assert not exchange.ripe
    exchange.start([])
    assert exchange.finish().rows == [[4.0]]
