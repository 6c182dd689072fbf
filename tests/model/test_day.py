"""Days of three jobs in simulated time, with a fault every few minutes and a bad call now and then.

What single faults and pairs never show: what adds up over hours, as budgets, waits, turns, views
and skewed clocks do. live() plays one again by its seed.
"""

import asyncio
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from ddpjob_contract import crd
from model.cluster import NODES, START
from model.faults import EVENTS, UNSEEN, Event, after, take_due
from model.story import World, job_body
from model.wire import Call
from support.invariants import Violation

JOBS = ("job", "b", "c")  # users' events are done to the first
WORK = timedelta(hours=2)
BETWEEN_SECONDS = 300.0  # between two events, in the mean
BAD_CALLS = 0.01
CRASHES = 0.0005  # of a replica, each time it is looked at
#: They weaken what an operator can be held to, from then on: for other days.
DEPOSING = ("second", "restore-2", "restore-8")
NEVER_AT_REST = 5000
VOLUME = {"persistentVolumeClaim": {"claimName": "x"}}
FENCE = {
    "nodeLost": {"policy": "Fence", "afterSeconds": 30},
    "snapshot": {"path": "/snapshots", "volume": VOLUME},
}
#: Of each new job one. Budgets are large or small: to fail by them is an end, too.
SPECS: tuple[dict[str, Any], ...] = (
    {},
    FENCE,
    {**FENCE, "restart": {"maxRestarts": 1000}},
    {"restart": {"maxRestarts": 1000, "maxDisruptions": 1000, "healAfterSeconds": 600}},
    {"replicas": 1, "ttlSecondsAfterFinished": 60},
    {"startupDeadlineSeconds": 60, "cleanPodPolicy": "All"},
    {"activeDeadlineSeconds": 5400, "replicas": 2},
)


def _node_for_long(world: World) -> None:
    """Twenty minutes: longer than Fence and the eviction wait."""
    world.cluster.silence(NODES[0])
    after(world, 20 * 60, world.cluster.heal_nodes)


ALL: dict[str, Event] = {**EVENTS, "node-for-long": _node_for_long}


def live(loop: asyncio.AbstractEventLoop, seed: int, hours: float, *, deposed: bool) -> World:
    """Three jobs at any time, each a new one when it is over; Violation if anything is wrong."""
    draw = Random(seed)
    world = World(loop)
    world.state.deposed = deposed
    names = [name for name in ALL if deposed or name not in DEPOSING]
    began: dict[tuple[str, int], object] = {}

    def fate(job: str, attempt: int, replica: int) -> int | None:
        uid = world.cluster.job(job)["metadata"]["uid"]  # type: ignore[index]
        since = began.setdefault((uid, attempt), world.cluster.now)
        if draw.random() < CRASHES:
            return draw.choice((1, 2, 3, 75, 76, 137, 143))
        return 0 if world.cluster.now - since >= WORK else None  # type: ignore[operator]

    def gate(call: Call) -> str:
        return draw.choice((*UNSEEN, "403", "quota")) if draw.random() < BAD_CALLS else ""

    world.fate, world.wire.gate = fate, gate
    next_at, moved_at, moves = START, START, 0
    while world.cluster.now < START + timedelta(hours=hours):
        now = world.cluster.now
        moves = moves + 1 if now == moved_at else 0
        moved_at = now
        if moves > NEVER_AT_REST:
            raise Violation("i15_quiescence", f"no rest after {moves} moves at {now}")
        for name in JOBS:
            if world.over(name):
                if world.cluster.job(name) is not None:
                    world.cluster.delete(crd.PLURAL, name)
                world.cluster.create(crd.PLURAL, job_body(name, **draw.choice(SPECS)))
        if now >= next_at:
            seconds = draw.expovariate(1 / BETWEEN_SECONDS)
            next_at = now + timedelta(seconds=seconds)
            after(world, seconds)
            world.cluster.quota = draw.choice((None, None, None, 4, 5, 7))
            ALL[draw.choice(names)](world)
            world.verify()
        take_due(world)
        if not world.tick():
            world.sleep()
    world.heal()
    world.must_end()
    return world


@pytest.mark.parametrize("deposed", [False, True], ids=["strict", "deposed"])
def test_days(loop, soak, deposed):
    """Two hours for each of two seeds; `make soak`: days of 24 hours for its share of forty."""
    hours, seeds = (24.0, range((soak[0] - 1) % 40, 40, soak[1])) if soak else (2.0, range(2))
    wrong = []
    for seed in seeds:
        try:
            live(loop, seed, hours, deposed=deposed)
        except Violation as error:
            wrong.append(f"seed {seed}, {hours:g} hours: {error}")
            print(wrong[-1], flush=True)  # a soak may be cut short
    assert not wrong, "\n".join(wrong)
