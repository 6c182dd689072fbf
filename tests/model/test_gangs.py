"""Stories of several jobs, dead nodes and long times, which no single fault tells."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest

from ddpjob_contract import crd
from model.cluster import NODES, START
from model.story import World, job_body
from support.objects import status

DAY = 24 * 3600


@pytest.mark.parametrize("quota", [3, 4, 5])
def test_two_gangs_that_do_not_fit_together_both_end(
    loop: asyncio.AbstractEventLoop, quota: int
) -> None:
    """Neither holds half of what the other needs for ever (I9); nobody heals anything here."""
    world = World(loop)
    for name in ("a", "b"):
        world.cluster.create(crd.PLURAL, job_body(name))
    world.cluster.quota = quota
    assert world.run(lambda: world.over("a") and world.over("b"), DAY)
    assert [world.phase(name) for name in ("a", "b")] == ["Succeeded", "Succeeded"]


def work_for(world: World, seconds: dict[str, float]) -> None:
    """Each gang trains for so long; by the first letter of its name."""
    at: dict[tuple[str, int], datetime] = {}

    def fate(job: str, attempt: int, replica: int) -> int | None:
        began = at.setdefault((job, attempt), world.cluster.now)
        length = timedelta(seconds=seconds[job[0]])
        if not replica and began == world.cluster.now:
            world.timers.append((None, began + length, lambda: None))
        return 0 if world.cluster.now >= began + length else None

    world.fate = fate


@pytest.mark.parametrize(("size", "quota"), [(3, 4), (3, 5), (2, 3)])
@pytest.mark.tier("gate")
def test_three_gangs_that_do_not_fit_together_all_end(
    loop: asyncio.AbstractEventLoop, size: int, quota: int
) -> None:
    world = World(loop)
    work_for(world, dict.fromkeys("abc", 3600))
    for name in "abc":
        world.cluster.create(crd.PLURAL, job_body(name, replicas=size))
    world.cluster.quota = quota
    assert world.run(lambda: all(map(world.over, "abc")), DAY, limit=100_000)
    assert world.cluster.now - START < timedelta(hours=8), (
        "one after the other, three hours of work"
    )


def test_no_charge_for_what_the_cluster_refuses(loop: asyncio.AbstractEventLoop) -> None:
    """Two hours without room, then room."""
    world = World(loop)
    world.cluster.create(crd.PLURAL, job_body())
    world.cluster.quota = 1
    world.run(lambda: False, 7200)
    assert status(world.cluster.jobs()[0])["restarts"]["charged"] == 0
    world.cluster.quota = None
    world.must_end()
    assert world.phase() == "Succeeded"


def test_a_job_with_fence_leaves_a_node_that_is_gone_for_good(
    loop: asyncio.AbstractEventLoop,
) -> None:
    spec = {
        "nodeLost": {"policy": "Fence", "afterSeconds": 30},
        "snapshot": {"path": "/snapshots", "volume": {"persistentVolumeClaim": {"claimName": "x"}}},
    }
    world = World(loop, fate=lambda *_: None)
    world.cluster.create(crd.PLURAL, job_body(**spec))
    assert world.run(lambda: world.phase() == "Running")
    gone = {pod["spec"]["nodeName"] for pod in world.cluster.pods()}.pop()
    world.cluster.silence(gone)
    for pod in world.cluster.pods():
        if pod["spec"]["nodeName"] == gone:
            world.cluster.disrupt(pod, "DeletionByTaintManager")
    assert world.run(lambda: world.cluster.status("job").get("attempt") == 2)
    assert world.run(lambda: world.phase() == "Running")
    world.cluster.heal_nodes()  # the zombie's kubelet is back, and ends it
    world.heal()
    world.must_end()
    assert world.phase() == "Succeeded"


def test_waiting_for_any_node_is_told(loop: asyncio.AbstractEventLoop) -> None:
    """No scheduler has said a word about the pods, and yet the job is not silent (I19)."""
    world = World(loop)
    for node in NODES:
        world.cluster.silence(node)
    world.cluster.create(crd.PLURAL, job_body())
    world.run(lambda: False, 300)
