"""What a program prints is shown, and decides nothing."""

import json
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.spec import read
from support.world import World, env_of, job_object, rendered, running

PRINTED = {"step": 40, "totalSteps": 100, "loss": 0.25, "stepsPerSecond": 2.0}


def story(**state: Any) -> World:
    """Failures of one program, with such a progress heard of before each, until the job ends."""
    world = running(restart={"maxRestarts": 2, "healAfterSeconds": 0})
    for more in range(6):
        grown = {n: {**v, "step": v["step"] + more} for n, v in state.items()}
        last = {"version": 1, "kind": "exception", "exception": "E: no", "code": 1, **grown}
        world.poll(**grown).wait(60).end(1, 1, message=json.dumps(last)).wait(400)
        if world.phase == "Failed":
            break
        world.run()
    return world


def test_it_is_shown_with_an_estimate_of_the_end():
    world = running().poll(printed=PRINTED).wait(60)
    progress = world.status["progress"]
    assert (progress["stepOfTotal"], progress["loss"]) == ("40/100", 0.25)
    assert "step" not in progress
    assert world.status["eta"]["remaining"] == "30s"
    for replica in (1, 2, 0):
        last = {"version": 1, "kind": "success", "printed": {**PRINTED, "step": 100, "loss": 0.125}}
        world.end(replica, 0, message=json.dumps(last))
    progress = world.status["progress"]
    assert (world.phase, progress["stepOfTotal"], progress["loss"]) == (
        "Succeeded",
        "100/100",
        0.125,
    )


def test_the_programs_own_numbers_are_shown_at_most_eight():
    own = {"accuracy": 0.98123456, "x\n" * 99: 1.0, "bad": "y", **{f"n{i}": i for i in range(9)}}
    found = running().poll(step=7, metrics=own).wait(60).status["progress"]["metrics"]
    assert len(found) == 8
    assert (found["accuracy"], "bad" in found) == (0.981235, False)
    assert max(map(len, found)) <= 40


def test_what_the_library_reports_comes_first():
    world = running().poll(step=7, totalSteps=9, printed=PRINTED).wait(60)
    assert world.status["progress"]["stepOfTotal"] == "7/9"


def test_a_total_that_is_not_known_any_more_is_not_shown():
    world = running().poll(printed=PRINTED).wait(60).poll(printed={"step": 125}).wait(60)
    assert world.status["progress"]["stepOfTotal"] == "125"


def test_it_is_no_sign_of_a_program_that_reports_its_steps():
    world = running().poll(step=5).wait(60)
    before = world.status["progress"]["updatedAt"]
    world.poll(printed={"loss": 0.5}).wait(60)
    found = world.status["progress"]
    assert (found["updatedAt"], found["loss"]) == (before, 0.5)


def test_it_charges_heals_and_ends_nothing():
    """The same failures have the same end, whatever steps the program prints."""
    silent, printing = story(), story(printed=PRINTED)
    assert printing.phase == silent.phase == "Failed"
    assert printing.counts == silent.counts
    decided = [
        [did for did in one.log if not did.startswith("status Running")]  # progress is written now
        for one in (printing, silent)
    ]
    assert decided[0] == decided[1]
    assert [e.reason for e in printing.events] == [e.reason for e in silent.events]
    assert [one.get("step") for one in printing.status["failures"]] == [None] * 3


def test_no_pod_takes_it_for_a_step_that_was_reached():
    world = running().poll(printed=PRINTED).wait(60).end(1, 1).wait(1).run()
    env = {e["name"] for e in world.pods["job-1"]["spec"]["containers"][0]["env"]}
    assert contract.REACHED_STEP not in env


@pytest.mark.parametrize(
    "state", [{"step": "x", "loss": "y"}, [], {"step": -1, "loss": float("nan")}]
)
def test_a_strangers_words_show_nothing(state):
    found = observe.progress({"printed": state}, observe.parse_time("2026-01-01T00:00:00Z"))  # type: ignore[arg-type,attr-defined]
    assert found is not None
    assert (found.shown, found.loss) == ((None, None), None)


def test_the_launcher_gets_expressions_as_they_are_written():
    assert contract.OUTPUT not in env_of(rendered())
    env = env_of(rendered(output={"step": r"it (\d+)$"}))
    assert env[contract.OUTPUT] == r'{"step": "it (\\d+)$$"}', "the kubelet makes it one $"


def test_an_expression_that_cannot_be_is_named_and_harms_no_gang():
    found = read(job_object(output={"step": "("})["spec"])
    assert found.flaw.startswith("spec.output.step: '(' is no regular expression")
    assert found.replicas == 3
    world = running().patch(output={"step": "("})
    assert world.phase == "Running"
    assert world.condition("Invalid")["status"] == "True"
