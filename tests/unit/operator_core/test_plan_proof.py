"""Condition ResumeProven: whether a restart did its steps again bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpjob_operator.core.objects import observe, resumed
from support.world import World, job_object

EQUAL = {"equal": True, "first": 13, "last": 15}
DIFFERS = {"equal": False, "step": 14, "rank": 2, "what": "random numbers"}


def running() -> World:
    world = World(job_object()).settle().run()
    world.events.clear()
    return world


def poll(world: World, **more: Any) -> World:
    raw = {"version": 1, "attempt": world.status["attempt"], "step": 20, **more}
    world.feedback = replace(world.feedback, progress=observe.progress(raw, world.now))
    return world.wait(60)


def told(world: World) -> list[tuple[str, str]]:
    kinds = ("StepsRepeatedEqual", "StepsDiffer")
    return [(e.type, e.reason) for e in world.events if e.reason in kinds]


def condition(world: World) -> tuple[str, str] | None:
    found = world.condition("ResumeProven")
    return (found["status"], found["reason"]) if found else None


@pytest.mark.fault("T14")
def test_a_proven_restart_is_a_condition_and_one_event():
    world = poll(running())
    assert not any(c["type"] == "ResumeProven" for c in world.status["conditions"])
    poll(world, proof=EQUAL)
    assert condition(world) == ("True", "StepsRepeatedEqual")
    assert "steps 13 to 15" in world.condition("ResumeProven")["message"]
    poll(world, proof={"equal": True, "first": 19, "last": 22})
    assert "steps 19 to 22" in world.condition("ResumeProven")["message"]
    assert told(world) == [("Normal", "StepsRepeatedEqual")]


@pytest.mark.fault("T14")
def test_a_difference_stays_until_a_later_restart_is_proven():
    world = poll(running(), proof=DIFFERS)
    assert condition(world) == ("False", "StepsDiffer")
    message = world.condition("ResumeProven")["message"]
    assert message.startswith(
        "step 14, done again after a restart, differs on rank 2 in its random"
    )
    poll(poll(world, proof=DIFFERS))  # a new pod has nothing to tell
    assert condition(world) == ("False", "StepsDiffer")
    assert told(world) == [("Warning", "StepsDiffer")]
    poll(world, proof=EQUAL)
    assert condition(world) == ("True", "StepsRepeatedEqual")
    assert told(world)[1:] == [("Normal", "StepsRepeatedEqual")]


@pytest.mark.parametrize(
    "raw",
    [
        None, 7, [], {}, {"equal": True}, {"equal": 1, "first": 1, "last": 2},
        {"equal": True, "first": 3, "last": 2}, {"equal": True, "first": 0, "last": 2},
        {"equal": True, "first": 1, "last": 2**70}, {"equal": False, "step": 3},
        {"equal": False, "step": 3, "rank": 1, "what": "moon"},
        {"equal": False, "step": 3, "rank": 1, "what": ["loss"]},
        {"equal": False, "step": True, "rank": 1, "what": "loss"},
        {"equal": False, "step": 3, "rank": -1, "what": "loss"},
    ],
)  # fmt: skip
def test_what_a_stranger_may_write_says_nothing(raw: object):
    assert resumed.proof(raw) is None
