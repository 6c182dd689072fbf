"""The network objects of a gang that runs are looked at again, seldom and not all at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core import observe, render, spec, standing
from support.world import START, World, job_object


def running(uid: str = "a") -> World:
    job = job_object()
    job["metadata"]["uid"] = uid
    world = World(job).settle().run()
    world.outcomes = replace(world.outcomes, network_at=world.now)
    return world


def minutes_to_the_next_look(world: World) -> float:
    for minute in range(100):
        world.now = START + timedelta(minutes=minute)
        if any(isinstance(action, act.EnsureNetwork) for action in world.plan().actions):
            return minute
        world.settle()
    raise AssertionError("none")


def test_each_job_looks_at_a_time_of_its_own():
    times = {minutes_to_the_next_look(running(f"uid-{n}")) for n in range(20)}
    assert min(times) >= 15
    assert max(times) <= 46
    assert len(times) > 5


def test_after_a_refusal_it_looks_again_sooner_and_a_new_operator_does_not_look_at_once():
    world = running()
    refusal = act.Refusal(1, 403, "Forbidden", "no", world.now)
    world.outcomes = replace(world.outcomes, network_refusal=refusal)
    assert minutes_to_the_next_look(world) <= 8
    world = running().restart_operator()
    world.outcomes = replace(world.outcomes, seen_since=START)
    assert minutes_to_the_next_look(world) >= 15


@pytest.mark.fault("T11")
def test_after_a_round_it_looks_at_once_but_not_after_each_of_many():
    """Its processes meet by name: without the Service they would wait for one another for ever."""

    def looks(world: World) -> bool:
        return any(isinstance(action, act.EnsureNetwork) for action in world.plan().actions)

    world = running().wait(120)
    rounds = observe.rounds({"attempt": 1, "round": 1, "rounds": []})
    world.outcomes = replace(world.outcomes, rounds=rounds)
    while isinstance((todo := world.plan().actions)[0], act.WriteStatus):
        world.carry_out(todo[0])
    assert [type(action) for action in todo] == [act.EnsureNetwork]
    world.outcomes = replace(world.outcomes, network_at=world.now)
    rounds = observe.rounds({"attempt": 1, "round": 2, "rounds": []})
    world.now += timedelta(seconds=15)
    world.outcomes = replace(world.outcomes, rounds=rounds)
    world.carry_out(world.plan().actions[0])
    assert world.status["restarts"]["inPlace"] == 2
    assert not looks(world)
    world.now += timedelta(seconds=44)
    assert not looks(world)
    world.now += timedelta(seconds=1)
    assert looks(world)
    refusal = act.Refusal(1, 403, "Forbidden", "services are forbidden", world.now)
    world.outcomes = replace(world.outcomes, network_at=world.now, network_refusal=refusal)
    assert world.settle().condition("Stalled")["message"] == "services are forbidden"


def test_a_gang_that_does_not_run_is_not_looked_after():
    world = running().patch(suspend=True).wait(7200)
    assert world.plan() == act.Plan()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Service", lambda s: s["selector"].update(app="other")),
        ("NetworkPolicy", lambda s: s["podSelector"]["matchLabels"].update(app="other")),
        ("NetworkPolicy", lambda s: s["podSelector"].update(matchExpressions=[{"key": "x"}])),
        ("NetworkPolicy", lambda s: s["ingress"][0].update(ports=[{"port": 1}])),
        ("NetworkPolicy", lambda s: s["ingress"][0]["from"][0].update(namespaceSelector={})),
        ("NetworkPolicy", lambda s: s["ingress"][1].update({"from": [{"podSelector": {}}]})),
        ("NetworkPolicy", lambda s: s["ingress"].append({})),
    ],
)
def test_what_is_added_to_whom_it_selects_or_lets_in_is_taken_out(
    kind: str, change: Callable[[dict[str, Any]], None]
):
    """One more label and the Service has no pods; the gang would never meet again."""
    body = job_object()
    wanted = render.network(observe.job(body), spec.read(body["spec"]))
    ours = next(made for made in wanted if made["kind"] == kind)
    there: dict[str, Any] = copy.deepcopy({**ours, "status": {}})
    there["spec"]["ipFamilies"] = ["IPv4"]
    assert standing.mended(there, ours) is None
    change(there["spec"])
    mended = standing.mended(there, ours)
    assert mended
    assert mended["spec"] == {**ours["spec"], "ipFamilies": ["IPv4"]}
