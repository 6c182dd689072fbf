"""Gangs whose survivors save the newest step: stories, walks, and wrong variants that are found.

What a boundary may be read for, and when a manifest is written: tests/unit/trainer.
"""

import pytest

from ddpjob_trainer.launcher.hub.messages import Key
from model import wrong_gangs
from model.gang import GangWorld
from model.launchers import Launcher
from model.walks import begun, walk
from support import tiers
from support.invariants import Violation

MOVES = 200


def by_replica(world: GangWorld):
    return {one.replica: one for one in world.launchers.values() if one.alive}


def failed(loop, replica: int, *, status: int = -9, before=lambda there: None, **more) -> GangWorld:
    """A worker of a gang ends; the next round has begun."""
    world = begun(loop, rescues=True, **more)
    before(by_replica(world))
    by_replica(world)[replica].workers.end(status, world.seconds())
    assert world.run(lambda: world.whole() == Key(1, 1), 120)
    return world


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_survivor_of_each_failure_saves_the_newest_step(loop, replica):
    world = failed(loop, replica)
    assert [key for _, key in world.rescued.saved] == [Key(1, 0)]


@pytest.mark.parametrize(
    ("replicas", "what", "value", "whose", "saves"),
    [
        (4, "able", False, [0], True),  # the next is asked
        (3, "able", False, [0], False),  # no other is left to vouch
        (4, "able", False, [0, 2, 3], False),
        (4, "deaf", True, [0], False),  # the others are not kept waiting
        (3, "deaf", True, [2], False),
        (3, "bits", "flipped", [2], False),  # another one has other bits
    ],
)
def test_what_survivors_cannot_save_is_not_saved(loop, replicas, what, value, whose, saves):
    def before(there):
        for replica in whose:
            setattr(there[replica].workers.survivor, what, value)

    world = failed(loop, 1, before=before, replicas=replicas)
    assert bool(world.rescued.saved) == saves


def rank_0_died_in_its_body(loop, launcher: type[Launcher] = Launcher) -> GangWorld:
    """The others have ended the step after whose commit() it had more to do."""
    return failed(
        loop, 0, before=lambda there: setattr(there[0].workers.survivor, "late", True),
        launcher_class=launcher,
    )  # fmt: skip


def test_a_hub_that_saves_what_rank_0_left_unfinished_is_found_out(loop):
    assert not rank_0_died_in_its_body(loop).rescued.saved
    with pytest.raises(Violation) as found:
        rank_0_died_in_its_body(loop, wrong_gangs.ForgetsRank0)
    assert found.value.name == "r5_rank_0_finishes"


def test_who_is_amid_a_body_ends_it_before_it_saves(loop):
    def late(there):
        there[0].workers.survivor.late = there[2].workers.survivor.late = True

    assert failed(loop, 1, before=late).rescued.saved


def test_the_survivors_of_a_lost_pod_save(loop):
    world = begun(loop, rescues=True)
    world.kill(by_replica(world)[1])
    world.must_be_whole()
    assert [key for _, key in world.rescued.saved] == [Key(1, 0)]


def test_walks_with_rescues(loop, pytestconfig):
    seeds = {tiers.CHECK: 12, tiers.GATE: 60, tiers.ALL: 600}[pytestconfig.getoption("--tier")]
    saved = 0
    for seed in range(seeds):
        world = walk(loop, seed, MOVES, standby=seed % 2, rescues=True)
        saved += len(world.rescued.saved)
    assert saved > seeds // 10


@pytest.mark.parametrize(
    ("launcher", "seed", "name"),
    [
        (wrong_gangs.LeavesTheOthersRunning, 1, "r1_stop_follows"),
        (wrong_gangs.BelievesTheWriter, 3, "r4_second_opinion"),
    ],
)
def test_a_walk_finds_a_wrong_rescue(loop, launcher, seed, name):
    with pytest.raises(Violation) as found:
        walk(loop, seed, MOVES, rescues=True, launcher_class=launcher)
    assert found.value.name == name


def saved_behind_a_stopped_launcher(loop, launcher: type[Launcher]) -> GangWorld:
    """Replica 1's worker saves, and its launcher can say nothing of it for a while."""
    world = begun(loop, 4, rescues=True, launcher_class=launcher)
    there = by_replica(world)
    there[0].workers.end(-9, world.seconds())
    world.step(there[0])
    world.step(there[1])
    there[1].stopped = True
    world.run(lambda: False, 3)
    there[1].stopped = False
    world.must_be_whole()
    return world


def test_a_hub_that_asks_a_second_writer_is_found_out(loop):
    world = saved_behind_a_stopped_launcher(loop, Launcher)
    assert [len(one) for one in world.rescued.writers.values()] == [1]
    with pytest.raises(Violation) as found:
        saved_behind_a_stopped_launcher(loop, wrong_gangs.AsksAnotherWriterTooSoon)
    assert found.value.name == "r2_one_writer"


def test_a_hub_that_asks_before_it_knows_the_cause_is_found_out(loop):
    """Who lost a peer is heard of first."""
    assert failed(loop, 1, status=75).rescued.saved
    with pytest.raises(Violation) as found:
        failed(loop, 1, status=75, launcher_class=wrong_gangs.AsksBeforeTheCauseIsKnown)
    assert found.value.name == "r3_cause_is_known"
