"""Later gangs yield to earlier ones that wait for quota, for a part of the time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ddpjob_operator.core.actions import Refusal, Waiter
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.policy.starting import quota_fairness
from ddpjob_operator.shell.cache.store import Store
from support.world import START, World, job_object

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
NOON = datetime(2026, 1, 3, 12, tzinfo=UTC)


def waiting(*days: float) -> tuple[Waiter, ...]:
    """Gangs that wait for so many days when it is noon of a day that is a turn."""
    return tuple(Waiter(NOON - d * DAY, f"u{n}", f"big{n}") for n, d in enumerate(days))


def turns(waiters: tuple[Waiter, ...], days: int) -> list[str]:
    """Whose turn it is in steps of ten minutes."""
    looks = [NOON + n * 10 * MINUTE for n in range(days * 24 * 6)]
    found = [quota_fairness._turn(waiters, at) for at in looks]
    return [holder[0].name if holder else "" for holder in found]


@pytest.mark.parametrize("waited", [34, 50, 68, 135, 300, 1100])
def test_a_new_gang_begins_once_the_turn_of_an_earlier_one_is_over(waited: float):
    world = World(job_object())
    world.now = NOON
    earlier = Waiter(NOON - waited * MINUTE, "a", "big")
    while not (found := quota_fairness._turn((earlier,), world.now)):
        world.now += MINUTE
    world.feedback = replace(world.feedback, waiters=(earlier,))
    assert world.settle().phase == "Pending"
    assert world.condition("Stalled")["reason"] == "WaitingForTurn"
    assert "DDPJob big has waited for quota since" in world.condition("Stalled")["message"]
    left = (found[1] - world.now).total_seconds()
    assert world.wait(left - 1).phase == "Pending"
    assert world.plan().requeue_after == 1
    assert world.wait(1).phase == "Starting"


@pytest.mark.parametrize("apart", [0, 0.001, 0.5, 1, 2, 2.9])
@pytest.mark.parametrize("many", [1, 2, 3])
def test_most_of_the_time_is_everybodys_whoever_waits_and_each_has_turns(apart: float, many: int):
    """They fit nowhere; the days between them are what a hostile neighbour draws."""
    waiters = waiting(*(60 - n * apart for n in range(many)))
    found = turns(waiters, 18)
    assert found.count("") / len(found) == pytest.approx(2 / 3, abs=0.01)
    for waiter in waiters:
        assert found.count(waiter.name) / len(found) == pytest.approx(1 / 3 / many, abs=0.06)


@pytest.mark.parametrize("days", [(9, 0.4, 0.1), (9, 2, 1), (1.6, 0.8, 0.4), (0.1, 0.05, 0.03)])
def test_those_who_have_waited_differently_long_leave_time_too(days: tuple[float, ...]):
    """Each has waited for so long at every look: the worst that can be."""
    looks = [NOON + n * MINUTE for n in range(3 * 24 * 60)]
    found = [
        quota_fairness._turn(tuple(Waiter(at - d * DAY, "u", str(d)) for d in days), at)
        for at in looks
    ]
    assert found.count(None) / len(found) >= (2 / 3) ** 3
    assert {holder[0].name for holder in found if holder} == {str(d) for d in days}


def test_who_is_earlier_yields_to_nobody():
    world = World()
    world.refuse = lambda _: Refusal(
        world.status["attempt"], 403, "Forbidden", "exceeded quota: q", world.now
    )
    assert world.settle().phase == "Pending"
    later = Waiter(world.now + MINUTE, "a", "later")
    assert quota_fairness._turn((later,), NOON)
    world.feedback = replace(world.feedback, waiters=(later,))
    world.refuse = lambda _: None
    world.now = NOON
    assert world.settle().phase == "Starting"


def test_what_runs_and_restarts_yields_to_nobody():
    world = World().settle().run()
    world.now = NOON
    world.feedback = replace(world.feedback, waiters=waiting(60))
    assert world.settle().end(0, 1).run().phase == "Running"


def test_a_restart_that_meets_the_quota_yields_to_nobody_either():
    """Its usage is brought up to date moments after the gang's old pods are gone."""
    world = World().settle().run()
    world.now = NOON
    world.feedback = replace(world.feedback, waiters=waiting(60))
    world.refuse = lambda _: Refusal(2, 403, "Forbidden", "exceeded quota: q", world.now)
    assert world.settle().end(0, 1).phase == "Pending"
    world.refuse = lambda _: None
    assert world.wait(30).phase == "Starting"


def test_the_store_knows_who_waits():
    def job(name: str, since: int, *reasons: str, **more: object) -> observe.Job:
        pairs = zip(("Stalled", "Invalid"), reasons or ("QuotaExceeded",), strict=False)
        told = [{"type": type_, "status": "True", "reason": reason} for type_, reason in pairs]
        timings = {"startedAt": (START + since * MINUTE).isoformat()}
        status = {"phase": "Pending", "conditions": told, "timings": timings}
        body = {**job_object(), "status": status}
        body["metadata"] = {**body["metadata"], "name": name, "uid": f"uid-{name}", **more}
        return observe.job(body)

    store = Store()
    for name, since in [("c", 3), ("a", 1), ("d", 4), ("b", 2)]:
        store.put_job(job(name, since))
    store.put_job(job("elsewhere", 0, namespace="other"))
    store.put_job(job("x", 0, "Unschedulable"))
    store.put_job(job("y", 0, "QuotaExceeded", "SpecInvalid"))
    store.put_job(job("c", 3, "WaitingForTurn", resourceVersion="2"))
    assert [w.name for w in store.waiters("ns")] == ["a", "b", "c"]
    store.put_job(job("a", 1, "Unschedulable", resourceVersion="2"))
    store.forget_job(("ns", "b"), "uid-b")
    assert [w.name for w in store.waiters("ns")] == ["c", "d"]
    store.put_job(job("c", 3, uid="another", resourceVersion="3"))
    store.forget_job(("ns", "d"), "uid-d")
    assert [w.uid for w in store.waiters("ns")] == ["another"]
    assert [w.name for w in store.waiters("other")] == ["elsewhere"]
