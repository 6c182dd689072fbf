"""Stories of several jobs, dead nodes and long times, which no single fault tells."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from ddpjob_contract import crd
from ddpjob_operator.core.objects.status import Progress
from model.cluster import NODES, START
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


def test_progress_that_is_held_back_is_stored_though_nothing_else_happens(loop):
    """No list of jobs comes to its help: the API server's answers are slow, or the hub is gone."""
    world = World(loop, fate=lambda *_: None)
    world.cluster.create(crd.PLURAL, job_body())
    assert world.run(lambda: world.phase() == "Running")
    world.run(lambda: False, 1800)
    world.freeze(world.operator)
    (job,) = world.operator.store.jobs()
    for step in (1, 2):
        known = world.operator.store.feedback(job.uid)
        told = replace(known, progress=Progress(step=step, updated_at=world.cluster.now))
        world.operator.store.set_feedback(job.uid, told)
        world.operator.queue.add(job.key)
        while world.tick():
            pass
    assert world.cluster.status("job")["progress"]["step"] == 1, "written a moment ago"
    assert world.run(lambda: world.cluster.status("job")["progress"]["step"] == 2, 60)


def test_waiting_for_any_node_is_told(loop):
    """No scheduler has said a word about the pods, and yet the job is not silent (I19)."""
    world = World(loop)
    for node in NODES:
        world.cluster.silence(node)
    world.cluster.create(crd.PLURAL, job_body())
    world.run(lambda: False, 300)
