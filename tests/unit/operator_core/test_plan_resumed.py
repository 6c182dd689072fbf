"""A job that goes on from snapshots of another one, or of another program, says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ddpjob_operator.core.objects import observe, resumed
from support.world import World, job_object

OTHER = {"step": 400, "uid": "8f1c-2", "changed": ["script"]}
SAID = "another DDPJob (uid 8f1c-2), made by another script: its snapshot of step 400"


def running() -> World:
    world = World(job_object()).settle().run()
    world.events.clear()
    return world


def poll(world: World, **more: Any) -> World:
    raw = {"version": 1, "attempt": world.status["attempt"], **more}
    world.feedback = replace(world.feedback, progress=observe.progress(raw, world.now))
    return world.wait(60)


def succeed(world: World, **more: Any) -> World:
    for replica in (1, 2, 0):
        world.end(replica, 0, message=json.dumps({"version": 1, "kind": "success", **more}))
    return world


def told(world: World) -> list[tuple[str, str]]:
    kinds = ("OtherSnapshots", "ProgramChanged")
    return [(e.type, e.message) for e in world.events if e.reason in kinds]


@pytest.mark.fault("U17")
def test_the_snapshots_of_another_job_are_told_once():
    world = poll(running(), step=410, resumed=OTHER)
    assert world.status["progress"]["resumed"] == SAID
    ((kind, message),) = told(world)
    assert kind == "Warning"
    assert message.startswith(f"training goes on from {SAID}; to train anew apply it under")
    poll(poll(world, step=420, resumed=OTHER), step=430)
    assert len(told(world)) == 1
    assert world.status["progress"]["resumed"] == SAID
    world = succeed(world, step=500, resumed=OTHER)
    assert world.condition("Complete")["message"].endswith(f"it began from {SAID}")
    assert len(told(world)) == 1


@pytest.mark.fault("U17")
def test_a_job_with_nothing_left_to_train_says_so_though_nobody_asked_it_meanwhile():
    world = succeed(running(), step=400, resumed=OTHER)
    ((kind, message),) = told(world)
    assert (kind, "of step 400; 0 steps trained; to train anew" in message) == ("Warning", True)
    assert "step 400; 0 steps trained" in world.condition("Complete")["message"]
    assert world.status["progress"]["resumed"] == f"{SAID}; 0 steps trained"


def test_another_program_of_the_same_job_is_no_warning():
    changed = {"step": 9, "changed": ["script", "arguments"]}
    world = poll(running(), step=10, resumed=changed)
    said = "made by another script and other arguments: its snapshot of step 9"
    assert told(world) == [("Normal", f"training goes on from what was {said}")]
    assert "0 steps" not in succeed(world, step=9, resumed=changed).condition("Complete")["message"]


@pytest.mark.parametrize(
    "raw",
    [
        None, 7, [], {}, {"step": 4}, {"uid": "a"}, {"step": True, "uid": "a"},
        {"step": -1, "uid": "a"}, {"step": 2**70, "uid": "a"}, {"step": 4, "uid": "a\n" * 9},
        {"step": 4, "uid": "a" * 99}, {"step": 4, "uid": 4, "changed": "script"},
        {"step": 4, "changed": ["moon"]}, {"step": 4, "changed": [{}]},
    ],
)  # fmt: skip
def test_what_a_stranger_may_write_says_nothing(raw: object):
    assert resumed.words(raw) == ""
