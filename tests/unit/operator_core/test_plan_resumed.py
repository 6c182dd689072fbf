"""What is told of a resume: from whose snapshot, and whether the steps done again were equal."""

import json
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core.objects import observe
from support.world import World, env_of, rendered, running

KINDS = ("OtherSnapshots", "ProgramChanged", "StepsRepeatedEqual", "StepsDiffer")
OTHER = {"step": 400, "uid": "8f1c-2", "changed": ["script"]}
EQUAL = {"equal": True, "first": 13, "last": 15}
DIFFERS = {"equal": False, "step": 14, "rank": 2, "what": "random numbers"}
SAID = "another DDPJob (uid 8f1c-2), made by another script: its snapshot of step 400"


def poll(world: World, **more: Any) -> World:
    return world.poll(**more).wait(60)


def succeed(world: World, **more: Any) -> World:
    for replica in (1, 2, 0):
        world.end(replica, 0, message=json.dumps({"version": 1, "kind": "success", **more}))
    return world


def told(world: World) -> list[tuple[str, str]]:
    return [(e.type, e.message) for e in world.events if e.reason in KINDS]


@pytest.mark.fault("U17")
def test_the_snapshots_of_another_job_are_told_once():
    world = poll(running(), step=410, resumed=OTHER)
    assert world.status["progress"]["resumed"] == SAID
    ((kind, message),) = told(world)
    assert kind == "Warning"
    assert message.startswith(f"training goes on from {SAID}; to train from the")
    poll(poll(world, step=420, resumed=OTHER), step=430)
    assert len(told(world)) == 1
    assert world.status["progress"]["resumed"] == SAID
    world = succeed(world, step=500, resumed=OTHER)
    assert world.condition("Complete")["message"].endswith(f"it began from {SAID}")
    assert len(told(world)) == 1


@pytest.mark.fault("U17")
def test_a_job_with_nothing_left_to_train_says_so_without_a_poll():
    world = succeed(running(), step=400, resumed=OTHER)
    ((kind, message),) = told(world)
    assert (kind, "of step 400; 0 steps trained; to train" in message) == ("Warning", True)
    assert "step 400; 0 steps trained" in world.condition("Complete")["message"]
    assert world.status["progress"]["resumed"] == f"{SAID}; 0 steps trained"


def test_another_program_of_the_same_job_is_no_warning():
    changed = {"step": 9, "changed": ["script", "arguments"]}
    world = poll(running(), step=10, resumed=changed)
    said = "made by another script and other arguments: its snapshot of step 9"
    assert told(world) == [("Normal", f"training goes on from a state {said}")]
    assert "0 steps" not in succeed(world, step=9, resumed=changed).condition("Complete")["message"]


@pytest.mark.parametrize(
    "raw",
    [
        None, 7, [], {}, {"step": 4}, {"uid": "a"}, {"step": True, "uid": "a"},
        {"step": -1, "uid": "a"}, {"step": 2**70, "uid": "a"}, {"step": 4, "uid": "a\n" * 9},
        {"step": 4, "uid": "a" * 99}, {"step": 4, "uid": 4, "changed": "script"},
        {"step": 4, "changed": ["moon"]}, {"step": 4, "changed": [{}]},
        {"equal": True}, {"equal": 1, "first": 1, "last": 2},
        {"equal": True, "first": 3, "last": 2}, {"equal": True, "first": 0, "last": 2},
        {"equal": True, "first": 1, "last": 2**70}, {"equal": False, "step": 3},
        {"equal": False, "step": 3, "rank": 1, "what": "moon"},
        {"equal": False, "step": 3, "rank": 1, "what": ["loss"]},
        {"equal": False, "step": True, "rank": 1, "what": "loss"},
        {"equal": False, "step": 3, "rank": -1, "what": "loss"},
    ],
)  # fmt: skip
def test_what_a_stranger_may_write_says_nothing(raw):
    assert (observe.resumed(raw).get("resumed", ""), observe.proof(raw)) == ("", None)


def proven(world: World) -> tuple[str, str, str]:
    found = world.condition("ResumeProven")
    return found["status"], found["reason"], found["message"]


@pytest.mark.fault("T14")
def test_a_proven_restart_is_a_condition_and_one_event():
    world = poll(running())
    assert world.condition("ResumeProven") == {}
    said = proven(poll(world, proof=EQUAL))
    assert said[:2] == ("True", "StepsRepeatedEqual")
    assert "steps 13 to 15" in said[2]
    assert (
        "steps 19 to 22" in proven(poll(world, proof={"equal": True, "first": 19, "last": 22}))[2]
    )
    assert [kind for kind, _ in told(world)] == ["Normal"]


@pytest.mark.fault("T14")
def test_a_difference_stays_until_a_later_restart_is_proven():
    world = poll(running(), proof=DIFFERS)
    status, reason, said = proven(world)
    assert (status, reason) == ("False", "StepsDiffer")
    assert said.startswith("step 14, repeated after a restart, differs on rank 2 in its random")
    poll(poll(world, proof=DIFFERS))  # a new pod has nothing to tell
    assert proven(world) == (status, reason, said)
    assert [kind for kind, _ in told(world)] == ["Warning"]
    assert proven(poll(world, proof=EQUAL))[:2] == ("True", "StepsRepeatedEqual")
    assert [kind for kind, _ in told(world)] == ["Warning", "Normal"]


def saved(world: World) -> set[str | None]:
    return {env_of(pod).get(contract.SNAPSHOT_STEP) for pod in world.pods.values()}


@pytest.mark.parametrize("resume", ["Auto", "Never"])
def test_new_pods_are_told_the_newest_snapshot_that_the_status_knows_of(resume):
    snapshot = {"path": "/s", "volume": {"emptyDir": {}}, "resume": resume}
    world = poll(running(snapshot=snapshot), step=7, snapshotStep=0)
    assert saved(world.end(1, 1).wait(1).run()) == {None}
    poll(world, step=60, snapshotStep=50)
    assert saved(world.restart_operator().end(1, 1).wait(5)) == {"50"}
    world.run().end(2, 137, message=json.dumps({"version": 1, "kind": "exit", "snapshotStep": 90}))
    assert saved(world.wait(5)) == {"90"}
    world.run().patch(snapshot=snapshot | {"volume": {"hostPath": {}}}).end(1, 1).wait(5)
    assert world.pods == {}  # these snapshots lie elsewhere


def test_pods_without_snapshots_of_ours_are_told_of_none():
    assert saved(poll(running(), step=60, snapshotStep=50).end(1, 1).wait(5)) == {None}


@pytest.mark.parametrize(("given", "env"), [({}, None), ("Auto", None), (20, "20")])
def test_pods_are_given_a_number_of_steps_and_no_word(given, env):
    """An older trainer would take the word for a mistake; without it both take their default."""
    snapshot = {"path": "/s", "volume": {"emptyDir": {}}} | ({"everySteps": given} if given else {})
    assert env_of(rendered(snapshot=snapshot)).get(contract.SNAPSHOT_EVERY_STEPS) == env
    world = poll(running(snapshot=snapshot), step=7, snapshotEvery=120)
    assert world.status["progress"]["snapshotEvery"] == 120, "what the trainer has chosen"


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        ({"emptyDir": {}}, "1"),
        ({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}, "1"),
        ({"persistentVolumeClaim": {"claimName": "c"}}, None),
        ({"nfs": {"server": "s", "path": "/"}}, None),
    ],
)
def test_pods_know_whether_their_snapshots_end_with_them(source, ends):
    pod = rendered(snapshot={"path": "/s", "volume": source})
    assert env_of(pod).get(contract.SNAPSHOT_EPHEMERAL) == ends
