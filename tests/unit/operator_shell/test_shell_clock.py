"""The operator's clock: what came before it was set, or before a gap in sight, does not count."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.shell.api import Listing
from ddpjob_operator.shell.jobs import Resync
from ddpjob_operator.shell.reconciler import OperatorClock
from ddpjob_operator.shell.store import Store
from support.world import START, job_object

HOUR = timedelta(hours=1)


class Machine:
    """Its clock can be set; time passes all the same."""

    def __init__(self) -> None:
        self.passed, self.set_by, self.set = 0.0, timedelta(), 0
        self.clock = OperatorClock(
            60.0, wall=self.wall, monotonic=lambda: self.passed, stepped=self.was_set
        )

    def was_set(self) -> None:
        self.set += 1

    def wall(self) -> datetime:
        return START + timedelta(seconds=self.passed) + self.set_by

    def live(self, seconds: float) -> datetime:
        end = self.passed + seconds
        while self.passed < end:
            self.passed = min(end, self.passed + 30)
            self.clock.now()
            self.clock.received()
        return self.clock.now()


@pytest.mark.fault("U4")
@pytest.mark.parametrize("jump", [HOUR, -HOUR, 9600 * HOUR])
def test_a_clock_that_is_set_is_followed_and_earlier_times_do_not_count(jump):
    machine = Machine()
    machine.live(600)
    assert (machine.clock.seen_since(), machine.set) == (START, 0)
    machine.set_by = jump
    assert machine.clock.now() == machine.clock.now() == machine.wall()
    assert machine.clock.seen_since() == machine.wall()
    assert machine.set == 1, "what remembers times forgets them"


def test_a_clock_that_is_corrected_a_little_is_not_set():
    machine = Machine()
    for _ in range(10):
        machine.set_by += timedelta(seconds=1)
        assert machine.live(30) == machine.wall()
    assert (machine.clock.seen_since(), machine.set) == (START, 0)


def test_sight_counts_from_the_end_of_a_gap_and_from_now_during_one():
    machine = Machine()
    machine.live(600)
    assert machine.clock.seen_since() == START
    machine.passed += 600
    assert machine.clock.seen_since() == machine.clock.now()
    machine.passed += 5
    machine.clock.received()
    healed = machine.clock.now()
    machine.live(300)
    assert machine.clock.seen_since() == healed


def test_a_gap_of_one_namespace_is_its_own_and_a_take_over_is_one_of_all():
    """Or whoever takes the operator's rights in one would stop every deadline in all."""
    machine = Machine()
    machine.clock = OperatorClock(
        60.0, wall=machine.wall, monotonic=lambda: machine.passed, namespaces=("a", "b")
    )
    for _ in range(10):
        machine.passed += 30
        machine.clock.received("a")
    assert machine.clock.seen_since("a") == START
    assert machine.clock.seen_since("b") == machine.clock.now()
    machine.clock.interrupted()
    assert machine.clock.seen_since("a") == machine.clock.now()


class SlowApi:
    """A list of four jobs that takes 25 s for each."""

    def __init__(self) -> None:
        self.passed = 0.0

    async def list_all(self, *_: object, keep: Callable[[Any], Any]) -> Listing:
        items = []
        for number in range(4):
            self.passed += 25
            job = job_object()
            job["metadata"] |= {"name": f"job-{number}", "uid": f"uid-{number}"}
            items.append(keep(job))
        return Listing(items, "7")


async def test_a_slow_list_is_no_gap_in_sight_and_each_job_a_sign_of_life():
    """Or the startup deadline would begin anew with each, and the loop seem stuck."""
    api: Any = SlowApi()
    clock = OperatorClock(60.0, wall=lambda: START, monotonic=lambda: api.passed)
    resync = Resync(api, Store(), None, lambda _: None, lambda _: None, received=clock.received)
    for _ in range(3):
        await resync._list_all()
        api.passed += 30
    assert clock.seen_since() == START
    resync.alive_at = 0.0
    resync._take({}, job_object())
    assert resync.alive_at > 0.0
