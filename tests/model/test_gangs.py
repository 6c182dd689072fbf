"""Stories of several jobs, dead nodes and long times, which no single fault tells."""

from datetime import datetime, timedelta

import pytest

from ddpjob_contract import crd
from model.cluster import START
from model.story import World, job_body

DAY = 24 * 3600


@pytest.mark.fault("N9")
@pytest.mark.parametrize("quota", [3, 4, 5])
def test_two_gangs_that_do_not_fit_together_both_end(loop, quota):
    """Neither holds half of what the other needs for ever (I9); nobody heals anything here."""
    world = World(loop)
    for name in ("a", "b"):
        world.cluster.create(crd.PLURAL, job_body(name))
    world.cluster.quota = quota
    assert world.run(lambda: world.over("a") and world.over("b"), DAY)
    assert [world.phase(name) for name in ("a", "b")] == ["Succeeded", "Succeeded"]


def work_for(world: World, seconds: float) -> None:
    """Each gang trains for so long."""
    at: dict[tuple[str, int], datetime] = {}

    def fate(job: str, attempt: int, replica: int) -> int | None:
        if (job, attempt) not in at:
            at[job, attempt] = world.cluster.now + timedelta(seconds=seconds)
            world.timers.append((None, at[job, attempt], lambda: None))
        return 0 if world.cluster.now >= at[job, attempt] else None

    world.fate = fate


@pytest.mark.fault("N9")
@pytest.mark.parametrize(("size", "quota"), [(3, 4), (3, 5), (2, 3)])
@pytest.mark.tier("gate")
def test_three_gangs_that_do_not_fit_together_all_end(loop, size, quota):
    world = World(loop)
    work_for(world, 3600)
    for name in "abc":
        world.cluster.create(crd.PLURAL, job_body(name, replicas=size))
    world.cluster.quota = quota
    assert world.run(lambda: all(map(world.over, "abc")), DAY, limit=100_000)
    assert world.cluster.now - START < timedelta(hours=8), "three hours of work, one by one"


def test_two_operators_with_other_views_write_of_a_stall_at_a_slow_pace(loop):
    world = World(loop, fate=lambda *_: None)
    world.cluster.create(crd.PLURAL, job_body())
    assert world.run(lambda: world.phase() == "Running")
    world.state.deposed = True
    world.start_operator()
    world.freeze(world.operators[0], plurals=("nodes",))
    world.cluster.silence(world.cluster.pods()[0]["spec"]["nodeName"])
    before = len(world.cluster.history)
    world.run(lambda: False, 60)
    writes = [w for w in world.cluster.history[before:] if w.plural == crd.PLURAL]
    assert 10 < len(writes) <= 62, "each tells what it sees, every other second"
