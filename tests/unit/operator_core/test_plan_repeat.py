"""Stories of programs that fail again and again, or before they have begun."""

import json
from typing import Any

import pytest

from support.world import World, running

SHAPES = "ValueError: shapes (3, 4) and (5,) do not match"


def record(number: int, step: int, exception: str = SHAPES, **more: Any) -> dict[str, Any]:
    """A round that ended, as our launcher writes it."""
    return {
        "round": number, "replica": 0, "rank": 0, "code": 1, "kind": "exception",
        "exception": exception, "step": step, **more,
    }  # fmt: skip


def report(step: int, *rounds: dict[str, Any], exception: str = SHAPES, **more: Any) -> str:
    return json.dumps({
        "version": 1, "kind": "exception", "code": 1, "exception": exception, "step": step,
        "round": len(rounds), "rounds": rounds, **more,
    })  # fmt: skip


def loops(world: World) -> bool:
    return world.stalled == "CrashLooping"


@pytest.mark.fault("U15")
def test_rounds_that_fail_again_and_again_are_told_while_the_gang_runs():
    """A script that dies every 25 steps: each round makes progress, so none is charged."""
    world, rounds = running(), []
    for number in range(4):
        rounds.append(record(number, 25 * (number + 1), snapshotStep=25 * (number + 1)))
        world.wait(60).poll(*rounds, step=25 * number)
        assert loops(world) == (number >= 2), number
    assert (world.phase, world.status["restarted"]) == ("Running", "0+4")
    assert (world.status["reason"], world.status["message"]) == ("CrashLooping", SHAPES)
    (said,) = world.told("CrashLooping")
    assert said.startswith(
        f"replica 0 (rank 0) on node1: {SHAPES}, exit code 1 [User]: the last of 3 failures within"
        " 2 min, 3 of them restarted in place, each so; "
    )


def test_of_a_loop_without_an_exception_the_end_is_told():
    world = running(restart={"maxRestarts": 9})
    for _ in range(3):
        world.end(0, 3).wait(300).run()
    assert world.status["message"] == "replica 0 (rank 0) on node1: ExitCode3, exit code 3 [User]"


def test_a_loop_that_has_ended_is_told_no_more_and_costs_nothing_meanwhile():
    world = running().poll(*(record(number, 25 * number) for number in range(3)))
    assert loops(world)
    world.log.clear()
    world.wait(599)
    assert (loops(world), world.log) == (True, [])
    assert 0 < (world.plan().requeue_after or 0) <= 1
    assert not loops(world.wait(1))
    assert "reason" not in world.status
    assert len(world.log) == 1


@pytest.mark.parametrize("seconds", [1, 60, 140])
def test_a_loop_of_attempts_does_not_flap_with_them(seconds):
    world = running(restart={"maxRestarts": 9, "backoff": {"maxSeconds": 300}})
    for number in range(8):
        world.wait(seconds).end(0, 1).wait(300).run()
        assert loops(world) == (number >= 2), number
    assert len(world.told("CrashLooping")) == 1


def test_failures_that_are_nobodys_or_seldom_are_no_loop():
    world = running(restart={"maxRestarts": 9})
    for _ in range(4):
        world.vanish(0).wait(9).run()
    assert not loops(world)
    for number in range(4):
        world.wait(460).end(0, 1, message=report(number + 1))
        world.wait(300).run().wait(5).wait(5)  # looked at while it runs
        assert not loops(world)


#: What shows that the program trains, or that time heals what it did.
TRAINS: dict[str, dict[str, Any]] = {
    "reports": {"step": 3}, "prints": {"printed": {"step": 3}},
    "writes": {"fileModifiedAt": "2026-01-02T03:04:05Z"}, "has a loss": {"printed": {"loss": 0.5}},
}  # fmt: skip


@pytest.mark.parametrize("restart", [{}, {"healAfterSeconds": 0}, {"healAfterSeconds": 600}])
def test_failures_without_a_step_are_a_loop_however_far_apart(restart):
    """torchrun --standalone in a gang: its rendezvous gives up after ten minutes."""
    world = running(restart={"maxRestarts": 9, **restart})
    for number in range(6):
        world.wait(601).end(0, 1).wait(1).run().poll().wait(5)
        assert loops(world) == (number >= 2 and restart.get("healAfterSeconds") != 600), number
    assert len(world.told("CrashLooping")) <= 1


def test_what_saved_each_step_before_it_failed_is_no_loop():
    world = running(restart={"maxRestarts": 9})
    for number in range(1, 5):
        saved = {"step": 1000 * number, "snapshotStep": 1000 * number}
        world.wait(30).poll(**saved).wait(1800).end(0, 1, message=report(1000 * number))
        world.wait(300).run().poll(**saved).wait(5)
        assert not loops(world), number


def test_what_may_train_unseen_is_no_loop_where_it_seldom_fails():
    world = running(restart={"maxRestarts": 9})
    for number in range(4):
        world.wait(1800).end(0, 1).wait(300).run().wait(5)
        assert not loops(world), number


@pytest.mark.parametrize("how", TRAINS)
def test_a_loop_without_a_step_ends_with_any_progress(how):
    world = running(restart={"maxRestarts": 9})
    for _ in range(3):
        world.wait(601).end(0, 1).wait(1).run().wait(5)
    assert loops(world.wait(1000))
    assert not loops(world.poll(**TRAINS[how]).wait(5))


@pytest.mark.fault("U15")
def test_the_same_exception_at_the_same_step_three_times_ends_the_job():
    world = running().end(0, 1, message=report(40, record(0, 40), record(1, 40)))
    assert (world.phase, world.status["reason"]) == ("Failed", "SameFailure")
    said = f"{SHAPES}: 3 times in a row after step 40"
    assert world.condition("Failed")["message"].startswith(said)
    assert world.loss["exception"] == SHAPES


def test_attempts_and_rounds_count_alike_whatever_was_saved_between():
    rest = {"exception": SHAPES + "!" * 300}
    world = running().end(0, 1, message=report(40, **rest)).run()
    world.end(0, 1, message=report(40, record(0, 40, snapshotStep=10, **rest), **rest))
    assert world.condition("Failed").get("reason") == "SameFailure"


@pytest.mark.parametrize(
    "other",
    [{"step": 41}, {"exception": "ValueError"}, {"code": 137, "signal": 9}, {"exception": ""}],
)
def test_what_differs_is_tried_again(other):
    rounds = [record(0, 40), {**record(1, 40), **other}]
    assert running().end(0, 1, message=report(40, *rounds)).phase == "Starting"


def test_a_failure_without_a_step_since_the_snapshot_may_be_of_the_start():
    """The first collective meets a name server that is away, at the same step each time."""
    rounds = [record(0, 40, snapshotStep=40), record(1, 40, snapshotStep=40)]
    said = report(40, *rounds, snapshotStep=40)
    assert running().end(0, 1, message=said).phase == "Starting"
    assert running().end(0, 1, message=report(0, record(0, 0), record(1, 0))).phase == "Starting"


@pytest.mark.parametrize(("action", "phase"), [("Restart", "Starting"), ("Fail", "Failed")])
def test_a_rule_of_the_users_wins(action, phase):
    world = running(restart={"rules": [{"exitCodes": [1], "action": action}]})
    world.end(0, 1, message=report(40, record(0, 40), record(1, 40)))
    assert world.phase == phase
    assert world.condition("Failed").get("reason") in (None, "PermanentFailure")


def waits(world: World, **end: Any) -> list[float]:
    """Seconds before each restart, to the end of the job."""
    found = []
    while world.end(0, 1, **end).phase != "Failed":
        found.append(world.pause())
        world.wait(found[-1]).run()
    return found


@pytest.mark.fault("U16")
def test_a_start_that_fails_is_tried_over_ten_minutes():
    world = running()
    assert waits(world) == [0, 300, 300]
    assert "no step was reported, so delays" in world.told("Restarting")[-1]
    assert waits(running(), message=report(0, exception="socket.gaierror: no such name")) == [
        0, 300, 300,
    ]  # fmt: skip
    assert waits(running(restart={"maxRestarts": 5, "backoff": {"maxSeconds": 2000}})) == [
        0, 300, 600, 1200, 2000,
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["report", "poll"])
def test_a_failure_after_a_step_is_tried_at_once_as_ever(how):
    world = running(restart={"maxRestarts": 4})
    found = []
    for number in range(4):
        if how == "poll":
            world.poll(step=7 + number)
        message = report(7 + number) if how == "report" else ""
        found.append(world.end(0, 1, message=message).pause())
        world.wait(8).run()
    assert found == [0, 1, 2, 4]


REJECTED = "Pod was rejected: Node didn't have enough resource: cpu, requested: 64000, used: 950"


def refused(world: World, reason: str, message: str = REJECTED) -> World:
    """The kubelet takes no pod of replica 1: no container of it ever runs."""
    status = {"phase": "Failed", "reason": reason, "message": message}
    world.pods["job-1"]["status"] = status
    world.pods["job-1"]["spec"]["nodeName"] = "node2"
    return world.settle()


@pytest.mark.fault("N19")
@pytest.mark.parametrize("reason", ["OutOfcpu", "OutOfnvidia.com/gpu", "UnexpectedAdmissionError"])
def test_a_pod_that_kubelets_refuse_repeatedly_is_shown_and_ends_the_job(reason):
    """A template that names its node, or a scheduler that sees room where its kubelet sees none."""
    world = running()
    began = world.now
    for number in range(1, 8):
        refused(world, reason)
        assert loops(world) == (number >= 3 and world.phase != "Failed"), number
        if number >= 3:
            assert world.status["message"].startswith(REJECTED[:40])
        assert world.counts[1:] == (min(max(0, number - 3), 3), min(number, 3))
        if number < 7:
            world.wait(world.pause())
    assert world.status["reason"] == "MaxRestartsExceeded"
    assert (world.now - began).total_seconds() < 3600
    assert f"{reason}: {REJECTED}" in world.condition("Failed")["message"]


def test_a_cluster_without_dns_does_not_try_for_hours():
    words = "job-0.job.ns.svc does not resolve (Name or service not known)"
    world = running()
    for number in range(1, 8):
        world.end(1, 1, message=report(0, exception=words))
        assert world.counts[1:] == (min(max(0, number - 3), 3), min(number, 3))
        if number >= 3:
            assert world.status["message"] == words
        if number < 7:
            world.wait(world.pause()).run()
    assert world.status["reason"] == "MaxRestartsExceeded"


def test_once_a_refused_pod_runs_the_refusals_are_told_no_more():
    world = running()
    for _ in range(3):
        refused(world, "OutOfpods").wait(5)
    assert loops(world)
    assert (world.run().wait(2).stalled, world.phase) == ("", "Running")
    for _ in range(4):  # a lost node says nothing of the pod
        world.pods["job-1"]["status"] = {"phase": "Failed", "reason": "NodeLost"}
        world.settle().wait(300).run()
    assert world.counts[1] == 0
