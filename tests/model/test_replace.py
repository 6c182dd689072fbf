"""Stories of gangs of which only the lost pod is replaced, with an operator that dies meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from ddpjob_contract import crd
from ddpjob_operator.core.plan import plan
from model import wrong
from model.operators import Planner
from model.story import World, job_body
from model.test_machine import INDEX, JOBS, Machine, move
from support.invariants import Violation
from support.objects import attempt, replica, status, uid_of


def replacing(loop: asyncio.AbstractEventLoop, lost: int, planner: Planner = plan) -> World:
    """A gang that has trained, of which one pod is lost and the next one has just been made."""
    world = World(loop, fate=lambda *_: None, planner=planner)
    world.holds = True
    world.cluster.create(crd.PLURAL, job_body())
    assert world.run(lambda: bool(world.cluster.status("job").get("holds")))
    world.lose(world.cluster.pods()[lost], "137")
    assert world.run(lambda: 2 in map(attempt, world.cluster.pods()))
    return world


def made_twice(loop: asyncio.AbstractEventLoop, planner: Planner) -> World:
    """The operator dies, and with it the pod that it has just made: the next one never saw it."""
    world = replacing(loop, 0, planner)
    (made,) = (pod for pod in world.cluster.pods() if attempt(pod) == 2)
    world.cluster.force(made)
    world.restart(world.operator)
    assert world.run(lambda: uid_of(made) not in world.cluster.processes)
    world.run(lambda: 3 in map(attempt, world.cluster.pods()), 60)
    return world


@pytest.mark.fault("O7")
def test_after_a_crash_nobody_makes_a_second_hub_of_one_number(loop):
    world = made_twice(loop, plan)
    assert {attempt(pod) for pod in world.cluster.pods() if replica(pod) == 0} == {3}
    world.heal()
    world.must_end()


def test_who_makes_again_what_is_missing_is_found_out(loop):
    with pytest.raises(Violation) as found:
        made_twice(loop, wrong.makes_again_what_is_missing)
    assert found.value.name == "i2_one_birth"


def lost_beside_an_unseen_one(loop: asyncio.AbstractEventLoop, planner: Planner) -> World:
    """The next operator's cache lacks the newest pod, which is well, as the hub's GPU fails."""
    world = replacing(loop, 2, planner)
    assert world.run(lambda: world.phase() == "Running")
    history = world.cluster.history
    is_new = (w.plural == "pods" and attempt(w.obj) == 2 for w in history)
    world.restart(world.operator, 0, len(history) - [*is_new].index(True)).lose("pods")
    world.lose(world.cluster.pods()[0], "74")
    world.run(lambda: 3 in map(attempt, world.cluster.pods()), 60)
    return world


@pytest.mark.fault("O2")
def test_a_member_that_only_the_cache_misses_is_kept(loop):
    world = lost_beside_an_unseen_one(loop, plan)
    assert [attempt(pod) for pod in world.cluster.pods()] == [3, 1, 2]
    world.heal()
    world.must_end()


def test_who_takes_a_cache_for_the_gang_is_found_out(loop):
    with pytest.raises(Violation) as found:
        lost_beside_an_unseen_one(loop, wrong.raises_floors_by_its_cache)
    assert found.value.name == "i4_replaces_the_lost"


def second_hub_of_a_start(loop: asyncio.AbstractEventLoop, planner: Planner) -> World:
    """The operator dies as a whole gang starts, and with it the pod with its hub."""
    world = World(loop, fate=lambda *_: None, planner=planner)
    world.pulls = False
    world.cluster.create(crd.PLURAL, job_body())
    assert world.run(lambda: len(world.cluster.pods()) == 3)
    world.cluster.force(world.cluster.pods()[0])
    world.restart(world.operator)
    world.run(lambda: len(world.cluster.pods()) == 3, 60)
    return world


@pytest.mark.fault("O7")
def test_after_a_crash_in_a_whole_start_no_second_hub_has_its_number(loop):
    world = second_hub_of_a_start(loop, plan)
    assert [*map(attempt, world.cluster.pods())] == [2, 2, 2]
    world.heal()
    world.must_end()
    assert status(world.cluster.jobs()[0])["restarts"]["total"] == 0


def test_who_makes_the_hub_again_is_found_out(loop):
    with pytest.raises(Violation) as found:
        second_hub_of_a_start(loop, wrong.makes_again_what_is_missing)
    assert found.value.name == "i2_one_hub"


class Replacing(Machine):
    """The machine of test_machine.py from where two gangs train whose launchers hold."""

    @initialize()
    def begin(self) -> None:  # type: ignore[override]
        self.world.holds = True
        restart = {"maxRestarts": 100, "backoff": {"initialSeconds": 1, "maxSeconds": 1}}
        for name, replicas in zip(JOBS, (3, 2), strict=True):
            body = job_body(name, replicas=replicas, restart=restart)
            self.world.cluster.create(crd.PLURAL, body)
        assert self.world.run(
            lambda: all(self.world.cluster.status(name).get("holds") for name in JOBS)
        )

    @move(index=INDEX, code=st.sampled_from((75, 137)))
    def a_launcher_ends(self, index: int, code: int) -> None:
        """More often than in the other machine, by what does not end the job."""
        if pods := [pod for pod in self.world.cluster.pods() if self.world.cluster.runs(pod)]:
            self.world.cluster.finish(pods[index % len(pods)], code)


TestReplacing = pytest.mark.timeout(0)(pytest.mark.tier("gate")(Replacing.TestCase))
TestReplacing.settings = settings()
