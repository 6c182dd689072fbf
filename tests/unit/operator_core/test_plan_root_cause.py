"""A machine dies, and its peers end before anybody knows: whose doing was it?

Replicas 0 and 2 run on node1, replica 1 on node2. Pods go as kubelets let them go.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from ddpjob_operator.core import actions as act
from support.world import Machines, World, job_object

RULES = {"rules": [{"exitCodes": [1], "action": "Fail"}]}
SNAPSHOT = {"path": "/snapshots", "volume": {"emptyDir": {}}}


def running(**spec: object) -> World:
    world = World(job_object(**spec), machines=Machines(), graceful=True).settle().run()
    world.log.clear()
    world.events.clear()
    return world


def fall_silent(world: World, node: str) -> World:
    assert world.machines
    world.machines.down[node] = world.now
    return world.settle()


@pytest.mark.fault("N14")
@pytest.mark.parametrize("code", [1, 76, 134, 137])
@pytest.mark.parametrize("restart", [{"maxRestarts": 0}, RULES | {"maxRestarts": 9}])
def test_the_end_of_a_job_waits_for_kubernetes_word_on_the_nodes(code: int, restart: dict):
    if "rules" in restart:
        restart = {**restart, "rules": [{"exitCodes": [code], "action": "Fail"}]}
    world = running(restart=restart).end(0, code, settle=False).end(2, code)
    assert (world.phase, world.condition("Stalled")) == ("Running", {})
    world.wait(5)
    told = world.condition("Stalled")
    assert (told["reason"], world.status["reason"]) == ("WaitingForCause", "WaitingForCause")
    assert "pod job-1, which has not ended, is lost with node node2" in told["message"]
    fall_silent(world.wait(50), "node2")
    assert (world.phase, world.status["lastFailure"]["reason"]) == ("Restarting", "NodeLost")
    assert world.status["restarts"]["charged"] == 0
    assert world.status["restarts"]["disruptions"] == 1


def test_the_end_comes_in_a_minute_when_all_nodes_are_well():
    world = running(restart={"maxRestarts": 0}).end(0, 1)
    began = world.now
    while world.phase == "Running":
        world.wait(world.plan().requeue_after or 0)
    assert (world.phase, world.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")
    assert world.now - began == timedelta(seconds=60)
    assert world.status["lastFailure"]["class"] == "User"


def test_the_end_waits_for_nobody_once_all_have_ended():
    """So it is with our launcher: a failure of one ends them all."""
    world = running(restart={"maxRestarts": 0}).end(0, 1)
    assert world.phase == "Running"
    assert world.end(1, 75).end(2, 75).phase == "Failed"
    assert world.status["lastFailure"]["class"] == "User"
    assert "WaitingForCause" not in [event.reason for event in world.events]


def test_the_end_does_not_wait_where_no_node_may_be_read():
    world = World(job_object(restart={"maxRestarts": 0})).settle().run().end(0, 1)
    assert world.phase == "Failed"


@pytest.mark.parametrize("restart", [
    {"maxRestarts": 0, "maxDisruptions": 0},
    {"maxRestarts": 0, "rules": [{"reasons": ["NodeLost"], "action": "Fail"}]},
])  # fmt: skip
def test_the_end_does_not_wait_where_a_lost_node_would_be_the_end_too(restart: dict):
    assert running(restart=restart).end(0, 1).phase == "Failed"


def test_what_no_restart_can_mend_waits_for_nobody():
    assert running().end(0, 2).phase == "Failed"


def test_a_restart_waits_for_nobody():
    world = running().end(0, 1)
    assert (world.phase, world.status["restarts"]["charged"]) == ("Restarting", 1)


def test_a_new_operator_waits_anew_and_then_it_ends():
    world = running(restart={"maxRestarts": 0}).end(0, 1).wait(50)
    world.nodes = None
    machines, world.machines = world.machines, None
    world.restart_operator().settle()
    assert world.phase == "Running", "the nodes are not known yet"
    world.machines = machines
    assert world.wait(10).phase == "Failed"


def charged(world: World) -> int:
    found: int = world.status["restarts"]["charged"]
    return found


@pytest.mark.parametrize("code", [76, 137])
def test_peers_that_hang_or_are_killed_while_a_node_is_silent_are_charged_to_nobody(code: int):
    world = fall_silent(running(), "node2").end(0, code)
    assert world.status["lastFailure"]["reason"] == "NodeLost"
    assert charged(world) == 0


def init_failed(code: int, reason: str, **spec: object) -> World:
    """Replica 1, on node2, fails before its trainer starts; the others run."""
    world = World(job_object(**spec), machines=Machines(), graceful=True).settle().run(0, 2)
    ended = {"terminated": {"exitCode": code, "reason": reason}}
    world.pods["job-1"]["spec"]["nodeName"] = "node2"
    world.pods["job-1"]["status"] = {
        "phase": "Failed",
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {}}}],
        "initContainerStatuses": [{"name": "fetch", "state": ended}],
    }
    return world.settle()


@pytest.mark.parametrize("reason", ["OOMKilled", "Error"])
def test_exit_codes_of_rules_are_those_of_the_trainer_whatever_ended_an_init_container(
    reason: str,
):
    world = init_failed(137, reason, restart={"rules": [{"exitCodes": [137], "action": "Fail"}]})
    assert (world.phase, charged(world)) == ("Restarting", 1)


def test_the_removal_of_one_that_is_done_excuses_nobody():
    world = running(restart={"maxRestarts": 0}).end(2, 0).terminate(2)
    world.end(0, 1, settle=False).end(1, 1)
    assert (world.phase, world.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")


@pytest.mark.parametrize("message", ["", "no room"])
def test_what_is_given_back_meanwhile_takes_no_failure_with_it(message: str):
    """Replica 2 has no node, or does not start, and the time to start is over in the wait."""
    spec = job_object(restart={"maxRestarts": 0}, startupDeadlineSeconds=60)
    world = World(spec, machines=Machines(), graceful=True).settle().run(0, 1).wait(30)
    if message:
        no_room = {"type": "PodScheduled", "status": "False", "message": message}
        world.pods["job-2"]["status"] = {"conditions": [no_room]}
    else:
        world.waiting(2, "ContainerCreating")
    world.end(0, 1).wait(31)
    assert world.phase == "Starting"
    assert world.wait(29).condition("Failed")["reason"] == "MaxRestartsExceeded"
    assert world.status["lastFailure"]["reason"] == "ExitCode1"


@pytest.mark.parametrize(("code", "reason", "cls"), [
    (1, "ExitCode1", "User"),
    (75, "ExitCode75", "Infrastructure"),
])  # fmt: skip
def test_a_deadline_that_falls_into_the_wait_takes_no_failure_with_it(
    code: int, reason: str, cls: str
):
    world = running(restart={"maxRestarts": 0}, activeDeadlineSeconds=60).wait(57)
    assert world.end(0, code).phase == "Running"
    assert world.wait(3).condition("Failed")["reason"] == "DeadlineExceeded"
    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["class"], failure["replica"]) == (reason, cls, 0)
    assert reason in world.condition("Failed")["message"]
    counts = world.status["restarts"]
    assert (counts["total"], len(world.status["failures"])) == (0, 1)


@pytest.mark.parametrize(("code", "reason"), [(1, "ExitCode1"), (75, "ExitCode75")])
def test_a_suspension_that_falls_into_the_wait_takes_no_failure_with_it(code: int, reason: str):
    world = running(restart={"maxRestarts": 0}).end(0, code).wait(1).patch(suspend=True)
    assert (world.phase, world.status["lastFailure"]["reason"]) == ("Suspended", reason)
    assert reason in world.condition("Suspended")["message"]
    assert world.status["restarts"]["total"] == 0
    world.finish_deletions().wait(600).patch(suspend=False)
    assert (world.status["phase"], world.status.get("reason")) == ("Starting", None)
    world.wait(2).run()
    assert (world.phase, len(world.status["failures"])) == ("Running", 1)
    names = [found.name for found in world.measurements]
    assert names == ["time_to_running_seconds", "detection_seconds", "time_to_running_seconds"]
    assert (world.measurements[-1].value, charged(world)) == (2.0, 0)


@pytest.mark.parametrize("restart", [{"maxRestarts": 0}, {}])
def test_peers_of_one_that_was_deleted_while_nobody_looked_die_of_it(restart: dict):
    """By force, or while the operator was away: its object is gone before its peers' ends show."""
    world = running(restart=restart).restart_operator()
    del world.pods["job-1"]
    world.end(0, 1, settle=False).end(2, 1)
    assert (world.phase, world.status["lastFailure"]["reason"]) == ("Restarting", "PodDeleted")
    assert charged(world) == 0


def test_whoever_deletes_the_one_that_is_waited_for_does_not_fail_the_job():
    world = running(restart={"maxRestarts": 0}).end(0, 1).wait(10)
    assert world.status["reason"] == "WaitingForCause"
    assert world.vanish(1).phase == "Restarting"
    assert (charged(world), world.status["restarts"]["disruptions"]) == (0, 1)


def gone_while_nobody_looked(**restart: object) -> World:
    """node2 went, its object too, and then a new operator lists the nodes that are there."""
    world = running(restart=restart).restart_operator()
    assert world.machines
    world.machines.others_up = 3
    world.machines.gone["node2"] = world.now
    world.machines.guessed.add("node2")
    return world


def found_there(machines: Machines) -> None:
    machines.guessed.clear()
    machines.gone.clear()


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("deleted", [True, False])
def test_a_node_of_which_nobody_has_told_is_read_before_its_peers_are_charged(
    limit: int, deleted: bool
):
    """It may be new, or have been deleted before this operator began."""
    world = gone_while_nobody_looked(maxRestarts=limit)
    machines = world.machines
    assert machines
    machines.truth = machines.guessed.clear if deleted else lambda: found_there(machines)
    world.end(0, 1, settle=False).end(2, 1)
    if limit == 0 and not deleted:
        assert world.phase == "Running", "node2 may still fall silent"
        assert world.wait(60).phase == "Failed"
    loss, count = world.status["lastFailure"], world.status["restarts"]
    told = ("Infrastructure", "NodeLost") if deleted else ("User", "ExitCode1")
    assert (loss["class"], loss["reason"]) == told
    free = (count["total"], count["charged"], count["disruptions"])
    assert free == ((1, 0, 1) if deleted else (min(limit, 1), min(limit, 1), 0))
    assert world.log.count("read node2") == 1


def test_a_read_that_fails_holds_up_a_restart_for_a_minute_at_most():
    world = gone_while_nobody_looked(maxRestarts=3).end(0, 1, settle=False)
    began = world.now
    while world.phase == "Running":
        plan = world.plan()
        writes = [action for action in plan.actions if isinstance(action, act.WriteStatus)]
        for write in writes:
            world.carry_out(write)
        if not writes:
            assert plan.actions == (act.ReadNodes(("node2",)),)
            assert plan.requeue_after
            world.now += timedelta(seconds=plan.requeue_after)
    assert world.now - began == timedelta(seconds=60)
    assert world.status["lastFailure"]["class"] == "User"


@pytest.mark.fault("T13")
@pytest.mark.parametrize("code", [75, 76])
@pytest.mark.parametrize("report", [True, False])
def test_a_replica_that_ended_early_is_named_when_the_others_fail_for_want_of_it(
    code: int, report: bool
):
    """With 0, which no failure is; of a program whose launchers have no hub in common."""
    told = '{"version":1,"kind":"success","round":0,"step":12}' if report else ""
    world = running(restart={"maxRestarts": 3}).end(1, 0, message=told)
    world.end(0, code, settle=False).end(2, code).wait(5)
    after = " after step 12" * report
    words = f"replica 1 ended with 0 (Succeeded){after} while others waited for them; then "
    assert words in world.condition("Running")["message"]
    assert world.status["lastFailure"]["message"].startswith(words)
