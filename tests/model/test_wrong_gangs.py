"""Each wrong variant of the replacement protocol's table is found out, by a stored walk or story.

Undisturbed they all do well. What the table calls "missing is created again" is in test_replace.py;
"lead told before it is stored" needs standbys' lead, which the product has not.
"""

import asyncio
from random import Random
from typing import Any

import pytest

from ddpjob_contract import crd
from model import wrong_gangs
from model.cluster import Object
from model.gang import GangWorld
from model.launchers import Launcher
from model.walks import begun, walk, wander
from model.wire import ModelApi
from support.invariants import Violation


@pytest.mark.parametrize(
    ("launcher", "seed", "name"),
    [
        (wrong_gangs.TakesTheNewcomersNumber, 2, "k2_number_of_one_hub"),
        (wrong_gangs.KeepsTheNumber, 24, "k2_number_of_one_hub"),
        (wrong_gangs.GoesBeforeAllHaveStopped, 11, "k3_all_stand_still"),
        (wrong_gangs.SaysHelloBeforeWorkersAreGone, 0, "k3_all_stand_still"),
    ],
)
def test_a_walk_finds_a_wrong_hub_or_launcher(loop, launcher, seed, name):
    with pytest.raises(Violation) as found:
        walk(loop, seed, 150, launcher_class=launcher)
    assert found.value.name == name


def test_a_walk_finds_a_hub_that_gives_away_the_place_of_one_that_runs(loop):
    with pytest.raises(Violation) as found:
        walk(loop, 2, 150, standby=1, launcher_class=wrong_gangs.FillsPlacesOfThoseThatLeave)
    assert found.value.name == "k3_all_stand_still"


def gpu_failed(loop: asyncio.AbstractEventLoop, replica: int, **more: Any) -> GangWorld:
    """A GPU of a replica fails; only its pod is replaced, on another node."""
    world = begun(loop, **more)
    there = {one.replica: one for one in world.launchers.values()}
    there[replica].workers.end(74, world.seconds())
    world.must_be_whole()
    job = world.cluster.status("job")
    lost = [number for number, one in there.items() if not one.alive]
    if lost != [replica] or job["restarts"]["replaced"] != 1:
        raise Violation("g1_only_its_pod", f"pods of replicas {lost} are lost")
    assert (there[replica].code, job["avoidedNodes"]) == (74, [there[replica].node])
    return world


@pytest.mark.fault("N13")
@pytest.mark.parametrize("replica", range(3))
def test_a_failed_gpu_costs_its_pod_alone_and_no_step(loop, replica):
    """With the hub's, as today, the survivors save nothing."""
    world = gpu_failed(loop, replica, rescues=True)
    assert len(world.rescued.saved) == (replica > 0)


def test_a_hub_that_ends_all_with_a_failed_gpu_is_found_out(loop):
    with pytest.raises(Violation) as found:
        gpu_failed(loop, 1, launcher_class=wrong_gangs.EndsAllWithAFailedGpu)
    assert found.value.name == "g1_only_its_pod"


def cut_off_and_replaced(
    loop: asyncio.AbstractEventLoop, launcher: type[Launcher], **more: Any
) -> GangWorld:
    """Nobody hears of replica 1's node; Fence gives it up, and its processes run on."""
    world = begun(loop, launcher_class=launcher, **more)
    (one,) = (one for one in world.launchers.values() if one.replica == 1)
    world.cluster.silence(one.node)
    world.network.cuts |= {frozenset((one.node, node)) for node in world.cluster.nodes}
    assert world.run(lambda: "1:2" in str(world.cluster.status("job").get("births")), 300)
    world.run(lambda: world.whole() is not None, 120)
    world.run(lambda: False, 60)
    assert one.alive
    return world


def test_the_survivors_of_a_node_lost_under_fence_save(loop):
    world = cut_off_and_replaced(loop, Launcher, rescues=True)
    assert [key for _, key in world.rescued.saved] == [(1, 0)]
    assert world.cluster.status("job")["restarts"]["replaced"] == 1


def test_successors_that_go_on_with_the_number_they_know_are_found_out(loop):
    world = cut_off_and_replaced(loop, Launcher)
    assert world.whole() == (1, 1)
    with pytest.raises(Violation) as found:
        cut_off_and_replaced(loop, wrong_gangs.SucceedsTheHub)
    assert found.value.name == "k1_one_list"


def test_a_planner_that_records_no_seat_counts_a_loss_twice(loop):
    world = begun(loop, planner=wrong_gangs.records_no_seat)
    world.kill(world.launchers[world.hub_pod])
    with pytest.raises(Violation, match=r"i4_cause_earned: .* counted a second time"):
        world.must_be_whole()


@pytest.mark.parametrize(("old", "seed"), [(False, 3), (True, 10)], ids=["lost", "of old"])
def test_a_planner_that_acts_on_lost_links_gives_up_who_waits(loop, old, seed):
    """As the hub tells of them, or one that is no more told."""
    planner = wrong_gangs.ActsOnLostLinks(old=old)
    world = planner.world = begun(loop, planner=planner)
    with pytest.raises(Violation) as found:
        wander(world, Random(seed), 150)
    assert found.value.name in ("i4_cause_earned", "i4_replaces_the_lost")


def test_a_status_without_its_version_is_found_out(loop, monkeypatch):
    """Of two operators that act at once, one stores what it began to think before the other."""
    guarded = ModelApi.replace

    async def unguarded(self: ModelApi, *args: Any, sub: str = "") -> Any:
        resource, namespace, name, body = args
        current: Object = self._operator.wire.cluster.get(crd.PLURAL, name)
        version = current["metadata"]["resourceVersion"]
        meta = {**body["metadata"], "resourceVersion": version}
        return await guarded(self, resource, namespace, name, {**body, "metadata": meta}, sub=sub)

    def story() -> GangWorld:
        world = begun(loop)
        world.state.deposed = True
        old = world.start_operator()
        world.freeze(old)
        world.kill(world.launchers[world.hub_pod])
        assert world.run(lambda: world.whole() is not None and world.phase() == "Running", 120)
        world.frozen.discard((old.name, "pods"))
        world.run(lambda: False, 60)
        return world

    assert story().whole() == (2, 0)
    monkeypatch.setattr(ModelApi, "replace", unguarded)
    with pytest.raises(Violation) as found:
        story()
    assert found.value.name in ("i4_attempt_monotone", "i4_one_cause", "i1_single_incarnation")
