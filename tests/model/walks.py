"""Random walks of a gang: faults anywhere, in any order, then none; played again by the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from ddpjob_contract import crd
from ddpjob_trainer.launcher.hub.messages import Key
from model.faults import UNSEEN, after, take_due
from model.gang import FENCE, NODES, RESTART, GangWorld
from model.launchers import Launcher
from model.story import job_body
from model.wire import Call

BAD_CALLS = 0.01
FAULTS = 0.12  # of the moves
#: Seconds from the last fault to a whole gang: replaceSeconds, a whole start, an eviction's grace.
BOUND = 600

Fault = Callable[["GangWorld", Random], object]


def _any_launcher(world: GangWorld, draw: Random) -> Launcher | None:
    there = [one for one in world.launchers.values() if one.alive]
    return draw.choice(there) if there else None


def _kill(world: GangWorld, draw: Random) -> None:
    if one := _any_launcher(world, draw):
        world.kill(one)


def _stop(world: GangWorld, draw: Random) -> None:
    """SIGSTOP, for a while."""
    if one := _any_launcher(world, draw):
        one.stopped = True
        after(world, draw.choice((1, 4, 20)), lambda: setattr(one, "stopped", False))


def _crash(world: GangWorld, draw: Random) -> None:
    if (one := _any_launcher(world, draw)) and one.workers.running:
        one.workers.end(draw.choice((74, 75, -11)), world.seconds())


def _early_success(world: GangWorld, draw: Random) -> None:
    if (one := _any_launcher(world, draw)) and one.workers.running:
        one.workers.end(0, world.seconds())


def _lose_pod(how: str) -> Fault:
    def act(world: GangWorld, draw: Random) -> None:
        if pods := world.cluster.pods():
            world.lose(draw.choice(pods), how)

    return act


def _machine_off(world: GangWorld, draw: Random) -> None:
    node = draw.choice(NODES)
    world.power_off(node)
    after(world, draw.choice((5, 60, 300)), lambda: world.power_on(node))


def _cut_off(world: GangWorld, draw: Random) -> None:
    """The API server does not hear of a node, whose processes run on; Fence gives them up."""
    node = draw.choice(NODES)
    if node not in world.cluster.silent:
        world.cluster.silence(node)
        after(world, draw.choice((5, 60, 300)), lambda: world.power_on(node))


def _cut_pair(world: GangWorld, draw: Random) -> None:
    pair = frozenset(draw.sample(NODES, 2))
    world.network.cuts.add(pair)
    after(world, draw.choice((1, 10, 90)), lambda: world.network.cuts.discard(pair))


def _timer(world: GangWorld, draw: Random) -> None:
    """A kernel takes a peer for lost, rightly or not."""
    if world.network.lines:
        world.network.break_off(draw.choice(world.network.lines))


def _stale_name(world: GangWorld, draw: Random) -> None:
    name = f"job-{draw.randrange(3)}"
    world.stale.add(name)
    after(world, draw.choice((2, 30)), lambda: world.stale.discard(name))


def _operator_restarts(world: GangWorld, draw: Random) -> None:
    if world.operators:
        world.restart(world.operator, draw.choice((0, 1, 5)), draw.choice((None, 0, 5)))


def _second_operator(world: GangWorld, draw: Random) -> None:
    if world.state.deposed and len(world.operators) == 1:
        world.start_operator(draw.choice((0, 4)))


def _freeze(world: GangWorld, draw: Random) -> None:
    if world.operators:
        thaw = world.freeze(draw.choice(world.operators))
        after(world, draw.choice((1, 10)), thaw)


def _suspend(world: GangWorld, draw: Random) -> None:
    world.edit("job", suspend=True)
    after(world, draw.choice((1, 20)), lambda: world.edit("job", suspend=False))


#: What happens to processes and links more often than what happens to the cluster.
EVENTS: dict[str, tuple[int, Fault]] = {
    "kill": (5, _kill),
    "stop": (3, _stop),
    "crash": (3, _crash),
    "early-success": (1, _early_success),
    "pod-delete": (1, _lose_pod("delete")),
    "pod-evict": (2, _lose_pod("evict")),
    "pod-force": (1, _lose_pod("force")),
    "machine-off": (1, _machine_off),
    "cut-off": (2, _cut_off),
    "cut-pair": (2, _cut_pair),
    "timer": (3, _timer),
    "stale-name": (1, _stale_name),
    "operator": (2, _operator_restarts),
    "second": (2, _second_operator),
    "freeze": (1, _freeze),
    "suspend": (1, _suspend),
}


def _survivor(what: str, value: object) -> Fault:
    def act(world: GangWorld, draw: Random) -> None:
        one = _any_launcher(world, draw)
        if one and (what != "late" or world.whole()):  # it stays where it is once a peer is lost
            setattr(one.workers.survivor, what, value)

    return act


#: In worlds with rescues.
OF_RESCUES: dict[str, tuple[int, Fault]] = {
    "unable": (2, _survivor("able", False)),
    "deaf": (2, _survivor("deaf", True)),
    "bits": (2, _survivor("bits", "flipped")),
    "late": (4, _survivor("late", True)),
}


def begun(
    loop: asyncio.AbstractEventLoop,
    replicas: int = 3,
    *,
    fence: bool = True,
    standby: int = 0,
    **more: Any,
) -> GangWorld:
    """A gang that trains and is known to hold."""
    world = GangWorld(loop, **more)
    restart = {**RESTART}
    spec = {"standby": standby, **(FENCE if fence else {})}
    world.cluster.create(crd.PLURAL, job_body(replicas=replicas, restart=restart, **spec))
    assert world.run(lambda: bool(world.cluster.status("job").get("holds")))
    assert world.whole() == Key(1, 0)
    return world


def walk(loop: asyncio.AbstractEventLoop, seed: int, moves: int, **more: Any) -> GangWorld:
    """Walk with faults, then without, until the gang is whole; Violation if anything is wrong."""
    draw = Random(seed)
    world = begun(loop, draw.choice((2, 3, 3, 4)), fence=draw.random() < 0.7, **more)
    world.state.deposed = draw.random() < 0.3
    wander(world, draw, moves)
    world.heal()
    world.must_be_whole(BOUND)
    world.must_finish()
    return world


def wander(world: GangWorld, draw: Random, moves: int) -> None:
    """Anybody moves and anything happens; ``world.met`` tells what, for a look at a violation."""
    world.wire.gate = lambda call: _harm(draw, call)
    events = EVENTS | (OF_RESCUES if world.rescues else {})
    weights = [weight for weight, _ in events.values()]
    for _ in range(moves):
        take_due(world)
        if draw.random() < FAULTS:
            (name,) = draw.choices(list(events), weights)
            world.met.append(f"{world.ticks} {world.cluster.now:%H:%M:%S} {name}")
            events[name][1](world, draw)
            world.verify()
        _anybody(world, draw)


def _anybody(world: GangWorld, draw: Random) -> None:
    """One move of whoever it may be."""
    which = draw.random()
    if which < 0.6:
        if not world.tick():
            world.sleep()
    elif which < 0.8:
        if one := _any_launcher(world, draw):
            world.learn()
            world.step(one)
    elif which < 0.9:
        if one := _any_launcher(world, draw):
            world.learn()
            world.worker_moves(one)
    else:
        world.sleep(draw.choice((0.1, 1.0, 3.0)))


def _harm(draw: Random, call: Call) -> str:
    return draw.choice(UNSEEN) if draw.random() < BAD_CALLS else ""
