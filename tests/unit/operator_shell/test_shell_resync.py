"""The list of all jobs now and then: what it says about sight, however slow it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpjob_operator.shell.api.client import Listing
from ddpjob_operator.shell.cache.store import Store
from ddpjob_operator.shell.clock import Clock
from ddpjob_operator.shell.watch.resync import Resync
from support.world import START, job_object


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


async def test_a_slow_list_is_no_gap_in_sight_and_each_job_a_sign_of_life() -> None:
    """Or the startup deadline would begin anew with each, and the loop seem stuck."""
    api: Any = SlowApi()
    clock = Clock(60.0, wall=lambda: START, monotonic=lambda: api.passed)
    resync = Resync(api, Store(), None, lambda _: None, received=clock.received)
    for _ in range(3):
        await resync._list_all()
        api.passed += 30
    assert clock.seen_since() == START
    resync.alive_at = 0.0
    resync._take({}, job_object())
    assert resync.alive_at > 0.0
