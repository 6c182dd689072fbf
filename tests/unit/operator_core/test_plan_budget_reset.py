"""Stories of budgets that heal: by progress that is seen, or by time in which nothing failed."""

import json
from datetime import timedelta
from typing import Any

import pytest

import ddpjob_contract as contract
from support.world import World, env_of, rendered, running

HOUR = 3600
#: Of the file server, whose clock has nothing to do with the operator's, which shows 2026.
OLD, NEW = "2098-01-01T00:00:00.000000Z", "2098-01-01T00:00:00.000001Z"
PAST = "1999-05-05T05:05:00.000000Z"


def restarted(**fields: Any) -> World:
    """Running again after one charged restart and one disruption."""
    world = running(**fields).end(1, 1).wait(1).run().vanish(0).wait(1).run()
    assert spent(world) == (1, 1)
    world.log.clear()
    world.events.clear()
    return world


def heard(world: World, **state: Any) -> World:
    """After a poll that told so much and is stored."""
    world.poll(**state).wait(3).log.clear()
    return world


def spent(world: World) -> tuple[int, ...]:
    return world.counts[1:]


def heals_in_an_hour(world: World) -> None:
    before = spent(world)
    assert (spent(world.wait(HOUR - 1)), spent(world.wait(1))) == (before, (0, 0))


def report(**fields: Any) -> str:
    return json.dumps({"version": 1, "kind": "signal", "rank": 1, "signal": 9, **fields})


def test_an_hour_without_a_failure_resets_budgets_and_backoff_at_once():
    world = restarted().wait(10)
    assert world.plan().requeue_after == HOUR - 10
    world.wait(HOUR - 11)
    assert spent(world) == (1, 1)
    assert world.plan().requeue_after == 1
    world.wait(1)
    restarts = world.status["restarts"]
    assert (spent(world), restarts["consecutive"], restarts["total"]) == ((0, 0), 0, 2)
    assert world.log == ["status Running 3"]
    (event,) = world.events
    assert (event.type, event.reason) == ("Normal", "BudgetHealed")
    assert event.message == (
        "3600 s without a failure: the budget is full again;"
        " spent until now: 1 restarts charged, 1 disruptions"
    )
    # And never again: there is nothing to heal, so nothing to write and nothing to wake for.
    world.wait(9 * HOUR)
    assert world.log == ["status Running 3"]
    assert world.plan().requeue_after is None


def test_the_budget_is_exact_again_after_it_has_healed():
    world = running(restart={"maxRestarts": 1, "healAfterSeconds": 60})
    for _ in range(3):
        world.end(1, 1).run().wait(60)
        assert (world.phase, spent(world)) == ("Running", (0, 0))
    world.end(1, 1).run().wait(59)
    assert world.end(1, 1).phase == "Failed"


def test_time_before_running_and_between_attempts_does_not_count():
    world = restarted(startupDeadlineSeconds=9 * HOUR, restart={"backoff": {"maxSeconds": 9999}})
    world.wait(HOUR - 1).end(1, 1)
    assert world.phase != "Running"
    assert spent(world.wait(2 * HOUR)) == (2, 1)
    heals_in_an_hour(world.run())


def test_a_suspended_job_does_not_heal_by_time():
    world = restarted().patch(suspend=True).wait(9 * HOUR)
    assert spent(world) == (1, 1)
    heals_in_an_hour(world.patch(suspend=False).run())


@pytest.mark.parametrize("seconds", [1, HOUR])
def test_a_gang_found_broken_does_not_heal_by_time(seconds):
    world = restarted()
    world.now += timedelta(seconds=seconds)
    assert spent(world.end(1, 1)) == (2, 1)


def test_a_round_starts_the_wait_anew_though_nothing_is_charged_for_it():
    world = restarted().wait(HOUR - 1).poll(round=1)
    assert world.plan().requeue_after in (2, HOUR)  # the next report, or the healing
    heals_in_an_hour(world)


def test_zero_turns_healing_by_time_off():
    world = restarted(restart={"healAfterSeconds": 0})
    assert world.wait(10).plan().requeue_after is None
    assert spent(world.wait(99 * HOUR)) == (1, 1)


def test_a_newer_snapshot_heals_as_soon_as_it_is_heard_of():
    world = heard(restarted(), step=40).poll(step=60, snapshotStep=50)
    assert spent(world) == (0, 0)
    assert world.log == ["status Running 3"]
    assert world.events[-1].message.startswith("a newer snapshot, of step 50: the budget")
    world.end(1, 1).wait(1).run()
    assert spent(world.poll(step=61, snapshotStep=50)) == (1, 0)


def test_a_newer_file_heals_once_for_each_newer_time():
    world = heard(restarted()).poll(fileModifiedAt=PAST)
    assert (spent(world), world.log) == ((0, 0), ["status Running 3"])
    assert world.events[-1].message.startswith("spec.restart.progressPath was written: the budget")
    assert world.status["progress"]["fileModifiedAt"] == PAST
    world.end(1, 1).wait(1).run()
    assert world.status["restarts"]["fileModifiedAt"] == PAST
    assert spent(world.poll(fileModifiedAt=PAST)) == (1, 0)
    assert spent(world.poll(fileModifiedAt=OLD)) == (0, 0)
    assert spent(world.end(1, 1).wait(1).run().poll(fileModifiedAt=OLD)) == (1, 0)
    assert spent(world.poll(fileModifiedAt=NEW)) == (0, 0)
    assert spent(world.end(1, 1).wait(1).run().poll(fileModifiedAt=NEW)) == (1, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"step": 500, "snapshotStep": 500}, {"step": 600, "snapshotStep": 550}),
        ({"fileModifiedAt": OLD}, {"fileModifiedAt": NEW}),
    ],
)
@pytest.mark.parametrize("last_words", [False, True])
def test_what_was_there_before_the_job_heals_nothing(old, new, last_words):
    """A crash before the first poll; then the snapshot that the job resumes from is heard of."""
    world = running().end(1, 1).wait(1).run()
    if "step" in old:
        heard(world)  # the launcher starts up: it does not know of steps yet
    if last_words:
        world.end(1, 137, message=report(**old)).wait(300).run()
    charged = 1 + last_words
    assert spent(world.poll(**old)) == (charged, 0)
    assert spent(world.wait(60).poll(**old)) == (charged, 0)
    assert spent(world.poll(**new)) == (0, 0)


@pytest.mark.parametrize(
    ("none", "first"),
    [({"step": 9}, {"step": 60, "snapshotStep": 50}), ({}, {"fileModifiedAt": OLD})],
)
def test_the_first_snapshot_heals_if_there_was_none_before(none, first):
    """Told in the attempt that was charged, or in the one that makes it; by another operator."""
    world = heard(running(), **none).end(1, 1).wait(1).run()
    assert spent(world.restart_operator().poll(**first)) == (0, 0)
    world = heard(running().end(1, 1).wait(1).run(), **none)
    assert spent(world.restart_operator().poll(**first)) == (0, 0)


def test_an_older_file_or_none_heals_nothing_and_takes_nothing_back():
    world = running().poll(fileModifiedAt=NEW).end(1, 1).run()
    assert world.status["restarts"]["fileModifiedAt"] == NEW
    for state in ({"fileModifiedAt": OLD}, {}, {"fileModifiedAt": NEW}):
        world.wait(3)
        assert spent(world.poll(**state)) == (1, 0)
    assert world.status["restarts"]["fileModifiedAt"] == NEW
    # Newer than what was told last, but not than what was known when the budget was charged.
    assert spent(world.poll(fileModifiedAt=OLD)) == (1, 0)


def test_the_launcher_knows_the_arguments_with_which_the_program_resumes():
    assert contract.RESUME_ARGS not in env_of(rendered())
    given = {"resumeArgs": ["--resume", "{newest}"], "resumeWhen": "out/*.pt"}
    env = env_of(rendered(restart=given))
    assert (env[contract.RESUME_ARGS], env[contract.RESUME_WHEN]) == (
        '["--resume", "{newest}"]', "out/*.pt",
    )  # fmt: skip


def test_the_launcher_is_told_what_counts_as_progress():
    env = env_of(rendered())
    assert (env.get(contract.PROGRESS_PATH), env[contract.HEAL_AFTER_SECONDS]) == (None, "3600")
    restart = {"healAfterSeconds": 0, "progressPath": "/data/checkpoints"}
    env = env_of(rendered(restart=restart))
    assert env[contract.PROGRESS_PATH] == "/data/checkpoints"
    assert env[contract.HEAL_AFTER_SECONDS] == "0"
