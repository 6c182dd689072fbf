"""Every fault that can meet the reference trace: on a call of the operator, or at a tick.

The reference is a fresh job of which one replica fails once: created, running, one loss, one
restart, success. A fault on a call happens to the n-th request; a fault at a tick is done to
the world before the n-th move. Both are named and numbered, so that any failure can be
replayed: python -m pytest tests/model/test_faults.py -k 'ID'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from ddpjob_contract import crd
from ddpjob_operator.core.plan import plan as real_plan
from model.cluster import NODES
from model.operators import Planner
from model.story import World, job_body, loses_one
from model.wire import Call
from support.invariants import Violation

#: What may happen to a call; see operators.Wire. The first group is the operator's alone: with
#: it the story must end as if nothing had happened.
UNSEEN = ("crash-before", "crash-after", "lost-call", "lost-reply", "500", "500-done", "409", "429")
SEEN = ("403", "quota", "422", "late", "hold")


Event = Callable[[World], object]


def _restart(behind: int = 0) -> Event:
    """The operator dies; the next one's first list is so many writes old."""
    return lambda world: world.restart(world.operator, behind)


def _second(world: World) -> None:
    """Another operator begins to act on an old view, and the first does not know."""
    world.state.deposed = True
    world.start_operator(behind=4)
    world.freeze(world.operators[0])
    _later(world, 6, lambda: setattr(world.operators[0], "dead", True))


def _gap(world: World) -> None:
    for operator in world.operators:
        operator.lose("pods")
        operator.lose(crd.PLURAL)


def _deaf(world: World) -> None:
    """The watches are silent for a while."""
    _later(world, 8, world.freeze(*world.operators))


def _old_pods(behind: int) -> Event:
    """The operator restarts; jobs are seen as they are, pods as they were, for a while."""

    def act(world: World) -> None:
        new = world.restart(world.operator, 0, behind)
        _later(world, 6, world.freeze(new, plurals=("pods",)))

    return act


def _pod(index: int, how: str) -> Event:
    def act(world: World) -> None:
        if pods := world.cluster.pods():
            world.lose(pods[index % len(pods)], how)

    return act


def _node(world: World) -> None:
    """A node is not heard of for a minute, then comes back."""
    world.cluster.silence(NODES[0])
    after(world, 60, world.cluster.heal_nodes)


def _suspend(world: World) -> None:
    world.edit("job", suspend=True)
    after(world, 20, lambda: world.edit("job", suspend=False))


def _mend(world: World) -> None:
    """Suspended, another template, resumed, before anybody looks."""
    world.edit("job", suspend=True)
    containers = [{"name": "trainer", "image": "other"}]
    world.edit("job", template={"spec": {"containers": containers}})
    world.edit("job", suspend=False)


def _deadline(world: World) -> None:
    """The user sets a deadline that is long past: only success may come before it."""
    world.edit("job", activeDeadlineSeconds=1)
    world.sleep(2)


def _delete_job(world: World) -> None:
    if world.cluster.job("job") is not None:
        world.cluster.delete(crd.PLURAL, "job")


def _recreate(world: World) -> None:
    _delete_job(world)
    world.cluster.create(crd.PLURAL, job_body())


def _unlabel(world: World) -> None:
    """Somebody takes our label off a pod: no list shows it any more."""
    for pod in world.cluster.pods()[:1]:
        world.relabel(pod, crd.LABEL_JOB_UID, None)


def _jump(hours: int) -> Event:
    return lambda world: [operator.jump(hours) for operator in world.operators]


def _pull(world: World) -> None:
    """Images cannot be pulled for half an hour: longer than the startup deadline."""
    world.pulls = False
    after(world, 1800, lambda: setattr(world, "pulls", True))


def _restore(back: int) -> Event:
    """etcd is restored from a backup; the operator is restarted, as the docs say."""

    def act(world: World) -> None:
        world.cluster.restore(min(back, len(world.cluster.history) - 3))
        world.restart(world.operator)

    return act


#: name -> what is done to the world before a tick.
EVENTS: dict[str, Event] = {
    "restart": _restart(),
    "restart-stale-1": _restart(1),
    "restart-stale-3": _restart(3),
    "restart-stale-9": _restart(9),
    "restart-stale-all": _restart(10_000),
    "old-pods-3": _old_pods(3),
    "old-pods-9": _old_pods(9),
    "second": _second,
    "gap": _gap,
    "deaf": _deaf,
    "pod-delete": _pod(0, "delete"),
    "pod-force": _pod(1, "force"),
    "pod-evict": _pod(2, "evict"),
    "pod-exit-1": _pod(0, "1"),
    "pod-exit-0": _pod(0, "0"),
    "pod-exit-75": _pod(2, "75"),
    "pod-exit-137": _pod(1, "137"),
    "pod-unlabelled": _unlabel,
    "node": _node,
    "suspend": _suspend,
    "mend": _mend,
    "deadline": _deadline,
    "job-delete": _delete_job,
    "job-recreate": _recreate,
    "clock-forward": _jump(1),
    "clock-back": _jump(-1),
    "no-image": _pull,
    "restore-2": _restore(2),
    "restore-8": _restore(8),
}


@dataclass(frozen=True, order=True, slots=True)
class Fault:
    """``place``: number of the call, or of the tick."""

    place: int
    what: str

    def __str__(self) -> str:
        return f"{self.what}@{self.place}"


def reference(loop: asyncio.AbstractEventLoop, planner: Planner = real_plan) -> World:
    """The story without a fault."""
    world = World(loop, fate=loses_one(), planner=planner)
    world.cluster.create(crd.PLURAL, job_body())
    if not world.run(world.over):
        raise Violation("i8_ends", "the undisturbed story has no end")
    return world


def singles(world: World) -> Iterator[Fault]:
    """All single faults of the reference trace."""
    for call in world.wire.calls:
        for harm in (*UNSEEN, *SEEN):
            if _meets(harm, call):
                yield Fault(call.number, harm)
    for tick in range(world.ticks):
        for what in EVENTS:
            yield Fault(tick, what)


def play(
    loop: asyncio.AbstractEventLoop, faults: tuple[Fault, ...], planner: Planner = real_plan
) -> World:
    """The story with these faults; Violation if an invariant breaks or it does not end."""
    world = World(loop, fate=loses_one(), planner=planner)
    on_calls = {f.place: f.what for f in faults if f.what not in EVENTS}
    at_ticks = sorted((f for f in faults if f.what in EVENTS), reverse=True)
    if any(f.what in ("second", "hold", "late") for f in faults):
        world.state.deposed = True
    world.wire.gate = lambda call: _gate(world, on_calls, call)
    world.cluster.create(crd.PLURAL, job_body())
    for _ in range(600):
        while at_ticks and at_ticks[-1].place <= world.ticks:
            EVENTS[at_ticks.pop().what](world)
            world.verify()
        take_due(world)
        if not at_ticks and world.over() and not on_calls:
            break
        if not world.tick():
            if world.over() and not at_ticks:
                break
            world.sleep()
    world.heal()
    world.must_end()
    return world


def story(world: World) -> tuple[object, ...]:
    """What must be the same with a fault that only the operator saw (I14).

    Not the attempt: who follows a dead one may not make its pod with the hub (O5).
    """
    found = world.cluster.status("job")
    created = [w.obj["metadata"]["name"] for w in world.cluster.history if w.kind == "ADDED"]
    return (found.get("phase"), found.get("restarts"), sorted(created))


def _gate(world: World, on_calls: dict[int, str], call: Call) -> str:
    harm = on_calls.pop(call.number, "")
    if harm == "hold":
        _later(world, 10, lambda: _release(world))
        _depose(world)
    if harm == "late":
        _later(world, 10, world.wire.deliver_late)
    return harm


def _depose(world: World) -> None:
    """Who is held up is no longer the leader; another one goes on."""
    held = world.operators[-1]
    _later(world, 1, lambda: (setattr(held, "leading", False), world.start_operator()))


def _release(world: World) -> None:
    for operator in list(world.operators):
        if operator.held:
            operator.release()
            operator.dead = True


def _meets(harm: str, call: Call) -> bool:
    if harm == "422":
        return call.verb == "create"
    if harm == "quota":
        return call.verb == "create" and call.plural == "pods"
    if harm in ("crash-after", "lost-reply", "500-done", "late", "409"):
        return call.writes
    return True


def _later(world: World, ticks: int, do: Callable[[], object]) -> None:
    world.timers.append((world.ticks + ticks, None, do))


def after(world: World, seconds: float, do: Callable[[], object] = lambda: None) -> None:
    """Do something at a time from now; without anything, time does not jump over it."""
    world.timers.append((None, world.cluster.now + timedelta(seconds=seconds), do))


def take_due(world: World) -> None:
    timers, world.timers = world.timers, []
    for tick, at, do in timers:
        if (tick is not None and tick <= world.ticks) or (at and at <= world.cluster.now):
            do()
        else:
            world.timers.append((tick, at, do))
