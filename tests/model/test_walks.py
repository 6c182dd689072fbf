"""Gangs of real launchers under a real operator: walks with any faults, and each fault alone.

A walk is played again by its seed: walk(loop, seed, MOVES). A single fault meets the replacement of
a member or of the hub at one move.
"""

import asyncio
from collections.abc import Iterable
from random import Random

import pytest

from model.faults import UNSEEN
from model.gang import GangWorld
from model.launchers import Launcher
from model.walks import BOUND, EVENTS, begun, walk
from support import tiers
from support.invariants import Violation
from support.objects import attempt, replica

MOVES = 200
PLACES = 40  # moves in which a replacement is done, and some
SAMPLED = {tiers.CHECK: 48, tiers.GATE: 6, tiers.ALL: 1}  # one of so many single faults


def broken(loop: asyncio.AbstractEventLoop, seeds: Iterable[int], standby: int = 0) -> list[str]:
    """Every walk that breaks an invariant, or after which the gang is not whole again."""
    found = []
    for seed in seeds:
        try:
            walk(loop, seed, MOVES, standby=standby)
        except Violation as violation:
            found.append(f"seed {seed}: {violation}")
            print(found[-1], flush=True)  # a soak may be cut short
    return found


@pytest.mark.timeout(0)  # a soak takes hours
def test_walks(loop, soak):
    """`make soak`: its share of ten thousand."""
    seeds = range(1000 + soak[0] - 1, 11_000, soak[1]) if soak else range(10)
    assert broken(loop, seeds) == []


@pytest.mark.tier("gate")
def test_more_walks(loop):
    assert broken(loop, range(10, 70)) == []


@pytest.mark.tier("all")
def test_many_walks(loop):
    assert broken(loop, range(70, 600)) == []


@pytest.mark.parametrize("standby", [1, 2])
def test_walks_where_pods_stand_by(loop, standby, pytestconfig):
    seeds = {tiers.CHECK: 8, tiers.GATE: 40, tiers.ALL: 400}[pytestconfig.getoption("--tier")]
    assert broken(loop, range(seeds), standby) == []


@pytest.mark.fault("T16")
def test_the_success_of_a_round_that_was_stopped_is_none(loop):
    """Replica 2 ended with 0 too early; then its hub is lost, and a standby trains it again."""
    world = begun(loop, standby=1)
    assert world.run(lambda: len(world.launchers) == 4 and all(map(_settled, _there(world))))
    seats = {replica(one.pod): one for one in world.launchers.values()}
    for seat, code in ((2, 0), (1, 1)):
        seats[seat].workers.end(code, world.seconds())
        for one in (seat, 0, 2, 0):
            world.step(seats[one])
    world.kill(seats[0])
    seats[2].stopped = True  # for so long that it comes too late
    assert world.run(lambda: seats[3].workers.running == 1, 200)
    seats[2].stopped = False
    (hub,) = (one for one in _there(world) if one.hub is not None)
    assert world.run(lambda: hub.hub.is_present(2), 60)
    for seat, code in ((hub, 0), (seats[1], 0), (seats[3], 2)):
        seat.workers.end(code, world.seconds())
    assert world.run(lambda: world.over() or world.cluster.status("job")["attempt"] > 2, 60)
    assert world.phase() != "Succeeded"


@pytest.mark.parametrize("leaver", [1, 2], ids=["another", "it"])
@pytest.mark.fault("T16")
def test_who_saves_as_the_hub_is_lost_stops_before_a_standby_begins(loop, leaver):
    """Its node shuts down, so nobody deletes the pod; workers save until they are killed."""
    world = begun(loop, standby=1)
    assert world.run(lambda: len(world.launchers) == 4 and all(map(_settled, _there(world))))
    seats = {replica(one.pod): one for one in world.launchers.values()}
    seats[leaver].terminate()
    for seat in (leaver, 0, 1, 2):
        world.step(seats[seat])
    saving, moves = seats[2], world.worker_moves
    world.worker_moves = lambda one: (one is not saving or one.workers.killed) and moves(one)  # type: ignore[method-assign]
    world.kill(seats[0])
    assert world.run(lambda: seats[3].workers.running == 1, 200)
    assert seats[3].replica != 2 or not saving.workers.running
    assert not saving.workers.running or saving.workers.key == seats[3].workers.key


def _there(world: GangWorld) -> list[Launcher]:
    return [one for one in world.launchers.values() if one.alive]


def _settled(one: Launcher) -> bool:
    return one.settled


def replaced(
    loop: asyncio.AbstractEventLoop, lost: int, place: int = 0, what: str = ""
) -> GangWorld:
    """Replica ``lost`` is killed, and a fault comes so many moves later."""
    world = begun(loop)
    (one,) = (one for one in world.launchers.values() if one.replica == lost)
    world.kill(one)
    for move in range(PLACES):
        if what and move == place:
            EVENTS[what][1](world, Random(place))
            world.verify()
        if not world.tick():
            world.sleep()
    return world


@pytest.mark.parametrize("lost", range(3))
def test_a_replacement_keeps_all_other_pods_and_their_launchers(loop, lost):
    world = replaced(loop, lost)
    assert world.whole() == ((2, 0) if lost == 0 else (1, 1))
    kept = {replica(pod) for pod in world.cluster.pods() if attempt(pod) == 1}
    assert kept == {0, 1, 2} - {lost}
    assert len([one for one in world.launchers.values() if one.alive]) == 3
    world.must_finish()
    told = world.cluster.status("job")["restarts"]
    assert (told["total"], told["replaced"], told["inPlace"]) == (1, 1, 0)


@pytest.mark.parametrize("lost", [0, 1], ids=["hub", "member"])
@pytest.mark.fault("N22")
def test_a_fault_while_a_pod_is_replaced(loop, lost, pytestconfig):
    """Any fault at any move: afterwards the gang is whole, and ends well."""
    places = [(place, what) for place in range(PLACES) for what in EVENTS]
    wrong = []
    for place, what in places[lost :: SAMPLED[pytestconfig.getoption("--tier")]]:
        try:
            world = replaced(loop, lost, place, what)
            world.heal()
            world.must_be_whole(BOUND)
            world.must_finish()
        except Violation as violation:
            wrong.append(f"{what}@{place}: {violation}")
            print(wrong[-1], flush=True)
    assert wrong == []


def calls(loop: asyncio.AbstractEventLoop, lost: int) -> range:
    """The operator's calls in the undisturbed story of a replacement."""
    return range(len(begun(loop).wire.calls), len(replaced(loop, lost).wire.calls))


@pytest.mark.parametrize("lost", [0, 1], ids=["hub", "member"])
@pytest.mark.fault("O7")
def test_what_only_the_operator_meets_costs_no_pod_and_counts_once(loop, lost, pytestconfig):
    """It dies before or after any write of a replacement, or a call fails."""
    harms = [(number, harm) for number in calls(loop, lost) for harm in UNSEEN]
    wrong = []
    for number, harm in harms[:: max(1, SAMPLED[pytestconfig.getoption("--tier")] // 2)]:
        world = begun(loop)
        met = {number: harm}
        world.wire.gate = lambda call, met=met: met.pop(call.number, "")  # type: ignore[misc]
        (one,) = (one for one in world.launchers.values() if one.replica == lost)
        world.kill(one)
        world.must_be_whole(BOUND)
        world.run(lambda world=world: not world.tick(), 10)  # type: ignore[misc]
        kept = {replica(pod) for pod in world.cluster.pods() if attempt(pod) == 1}
        counts = world.cluster.status("job")["restarts"]
        if kept != {0, 1, 2} - {lost} or (counts["total"], counts["replaced"]) != (1, 1):
            wrong.append(f"{harm}@{number}: kept {kept}, {counts}")
    assert wrong == []
