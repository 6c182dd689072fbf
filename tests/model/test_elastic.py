"""Elastic gangs of real launchers: a shrink, a growth, a partition, and walks with any faults.

Each wrong variant of the protocol's table that is the hub's is found out by the same stories.
"""

import asyncio

import pytest

from model import wrong_elastic as wrong
from model.gang import GangWorld
from model.launchers import Launcher
from model.walks import begun, walk
from support import tiers
from support.invariants import Violation


def elastic(loop: asyncio.AbstractEventLoop, launcher: type[Launcher] = Launcher) -> GangWorld:
    """Three launchers train, of which two are enough."""
    return begun(loop, least=2, launcher_class=launcher)


def lose(world: GangWorld, *replicas: int) -> None:
    for one in [*world.launchers.values()]:
        if one.alive and one.replica in replicas:
            world.kill(one)


def comes_and_goes(loop: asyncio.AbstractEventLoop, launcher: type[Launcher] = Launcher) -> None:
    """One is lost, and its pod starts later."""
    world = elastic(loop, launcher)
    world.pulls = False
    lose(world, 1)
    world.must_train(2)
    world.pulls = True
    world.must_be_whole()
    assert [*world.sizes.values()] == [3, 2, 3]
    world.must_finish()


def too_few(loop: asyncio.AbstractEventLoop, launcher: type[Launcher] = Launcher) -> None:
    """Two are lost, and the third holds until a pod starts."""
    world = elastic(loop, launcher)
    world.pulls = False
    lose(world, 1, 2)
    world.run(lambda: world.training() > 0, 60)
    assert world.training() == 0
    world.pulls = True
    world.must_be_whole()


def cut_apart(loop: asyncio.AbstractEventLoop, launcher: type[Launcher] = Launcher) -> None:
    """Two members do not reach one another any more, but both reach the hub."""
    world = elastic(loop, launcher)
    nodes = {one.replica: one.node for one in world.launchers.values()}
    world.network.cuts.add(frozenset((nodes[1], nodes[2])))
    world.must_train(2, 120)
    if any(key.number > 1 for _, key in world.began):
        raise Violation("e6_in_place", "all were made again")
    world.network.cuts.clear()
    world.must_be_whole()


@pytest.mark.fault("T9")
@pytest.mark.parametrize("story", [comes_and_goes, too_few, cut_apart])
def test_a_story_of_an_elastic_gang(loop, story):
    story(loop)


@pytest.mark.parametrize(
    ("launcher", "story", "name"),
    [
        (wrong.ShrinksBelowTheLeast, too_few, "e1_least"),
        (wrong.HasSeatsForRanks, comes_and_goes, "e1_ranks"),
        (wrong.KeepsTheRound, comes_and_goes, "e2_trains"),
        (wrong.SaysAnotherSize, comes_and_goes, "k1_one_list"),
        (wrong.GoesBeforeAllHaveStopped, comes_and_goes, "k3_all_stand_still"),
        (wrong.GrowsWithoutASnapshot, comes_and_goes, "e5_progress"),
        (wrong.NeverGrows, comes_and_goes, "h_whole_again"),
        (wrong.NeverLeavesOut, cut_apart, "e6_in_place"),
    ],
)
def test_a_wrong_hub_of_an_elastic_gang_is_found_out(loop, launcher, story, name):
    with pytest.raises(Violation) as found:
        story(loop, launcher)
    assert found.value.name == name


@pytest.mark.parametrize("seed", tiers.some_in_gate([*range(20)], 0, 1, 2))
def test_a_walk_of_an_elastic_gang(loop, seed):
    walk(loop, seed, 150, least=1 + seed % 2)
