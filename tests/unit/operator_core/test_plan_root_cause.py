"""A machine dies, and its peers end before anybody knows: whose doing was it?

Replicas 0 and 2 run on node1, replica 1 on node2. Pods go as kubelets let them go.
"""

import json
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from support.world import Machines, World, job_object, running

RULES = {"rules": [{"exitCodes": [1], "action": "Fail"}]}
SNAPSHOT = {"path": "/snapshots", "volume": {"emptyDir": {}}}


def on_nodes(**spec: Any) -> World:
    return running(machines=Machines(), graceful=True, **spec)


@pytest.mark.fault("N14")
@pytest.mark.parametrize("code", [1, 76, 134, 137])
@pytest.mark.parametrize("restart", [{"maxRestarts": 0}, RULES | {"maxRestarts": 9}])
def test_the_end_of_a_job_waits_for_kubernetes_word_on_the_nodes(code, restart):
    if "rules" in restart:
        restart = {**restart, "rules": [{"exitCodes": [code], "action": "Fail"}]}
    world = on_nodes(restart=restart).end(0, code, settle=False).end(2, code)
    assert (world.phase, world.condition("Stalled")) == ("Running", {})
    world.wait(5)
    assert (world.stalled, world.status["reason"]) == ("WaitingForCause", "WaitingForCause")
    (said,) = world.told("WaitingForCause")
    assert "pod job-1, which has not ended, is lost with node node2" in said
    world.wait(50).fall_silent("node2")
    assert (world.phase, world.loss["reason"]) == ("Restarting", "NodeLost")
    assert world.counts == (1, 0, 1)


def test_the_end_comes_in_a_minute_when_all_nodes_are_well():
    world = on_nodes(restart={"maxRestarts": 0}).end(0, 1)
    began = world.now
    while world.phase == "Running":
        world.wait(world.plan().requeue_after or 0)
    assert (world.phase, world.status["reason"]) == ("Failed", "MaxRestartsExceeded")
    assert world.now - began == timedelta(seconds=60)
    assert world.loss["class"] == "User"


def test_nothing_waits_where_no_node_can_change_it():
    none = {"maxRestarts": 0}
    world = on_nodes(restart=none).end(0, 1)
    assert world.phase == "Running"
    assert world.end(1, 75).end(2, 75).phase == "Failed", "all have ended, as with our launcher"
    assert (world.loss["class"], world.told("WaitingForCause")) == ("User", [])
    assert running(restart=none).end(0, 1).phase == "Failed", "no node may be read"
    assert on_nodes(restart={**none, "maxDisruptions": 0}).end(0, 1).phase == "Failed"
    rules = [{"reasons": ["NodeLost"], "action": "Fail"}]  # a lost node would be the end, too
    assert on_nodes(restart={**none, "rules": rules}).end(0, 1).phase == "Failed"
    assert on_nodes().end(0, 2).phase == "Failed", "no restart can mend it"
    world = on_nodes().end(0, 1)
    assert (world.phase, world.counts[1]) == ("Restarting", 1), "a restart is not final"


def test_a_new_operator_waits_anew_and_then_it_ends():
    world = on_nodes(restart={"maxRestarts": 0}).end(0, 1).wait(50)
    world.nodes = None
    machines, world.machines = world.machines, None
    world.restart_operator().settle()
    assert world.phase == "Running", "the nodes are not known yet"
    world.machines = machines
    assert world.wait(50).phase == "Running"
    assert world.wait(10).phase == "Failed"


def test_the_removal_of_one_that_is_done_excuses_nobody():
    world = on_nodes(restart={"maxRestarts": 0}).end(2, 0).terminate(2)
    world.end(0, 1, settle=False).end(1, 1)
    assert (world.phase, world.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")


@pytest.mark.parametrize("message", ["", "no room"])
def test_what_is_given_back_meanwhile_takes_no_failure_with_it(message):
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
    assert world.loss["reason"] == "ExitCode1"


@pytest.mark.parametrize(("code", "reason", "cls"), [
    (1, "ExitCode1", "User"),
    (75, "ExitCode75", "Infrastructure"),
])  # fmt: skip
def test_a_deadline_that_falls_into_the_wait_takes_no_failure_with_it(code, reason, cls):
    world = on_nodes(restart={"maxRestarts": 0}, activeDeadlineSeconds=60).wait(57)
    assert world.end(0, code).phase == "Running"
    assert world.wait(3).condition("Failed")["reason"] == "DeadlineExceeded"
    assert (world.loss["reason"], world.loss["class"], world.loss["replica"]) == (reason, cls, 0)
    assert reason in world.condition("Failed")["message"]
    assert (world.counts[0], len(world.status["failures"])) == (0, 1)


@pytest.mark.parametrize(("code", "reason"), [(1, "ExitCode1"), (75, "ExitCode75")])
def test_a_suspension_that_falls_into_the_wait_takes_no_failure_with_it(code, reason):
    world = on_nodes(restart={"maxRestarts": 0}).end(0, code).wait(1).patch(suspend=True)
    assert (world.phase, world.loss["reason"]) == ("Suspended", reason)
    assert reason in world.condition("Suspended")["message"]
    assert world.status["restarts"]["total"] == 0
    world.finish_deletions().wait(600).patch(suspend=False)
    assert (world.status["phase"], world.status.get("reason")) == ("Starting", None)
    world.wait(2).run()
    assert (world.phase, len(world.status["failures"])) == ("Running", 1)
    names = [found.name for found in world.measurements]
    assert names == ["detection_seconds", "time_to_running_seconds"]
    assert (world.measurements[-1].value, world.counts[1]) == (2.0, 0)


@pytest.mark.parametrize("restart", [{"maxRestarts": 0}, {}])
def test_peers_of_one_that_was_deleted_while_nobody_looked_die_of_it(restart):
    """By force, or while the operator was away: its object is gone before its peers' ends show."""
    world = on_nodes(restart=restart).restart_operator()
    del world.pods["job-1"]
    world.end(0, 1, settle=False).end(2, 1)
    assert (world.phase, world.loss["reason"]) == ("Restarting", "PodDeleted")
    assert world.counts[1] == 0


def test_whoever_deletes_the_one_that_is_waited_for_does_not_fail_the_job():
    world = on_nodes(restart={"maxRestarts": 0}).end(0, 1).wait(10)
    assert world.status["reason"] == "WaitingForCause"
    assert world.vanish(1).phase == "Restarting"
    assert world.counts[1:] == (0, 1)


def gone_while_nobody_looked(**restart: object) -> World:
    """node2 went, its object too, and then a new operator lists the nodes that are there."""
    world = on_nodes(restart=restart).restart_operator()
    world.machines.others_up = 3
    return world.node_gone("node2", guessed=True)


def found_there(machines: Machines) -> None:
    machines.guessed.clear()
    machines.gone.clear()


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("deleted", [True, False])
def test_an_unknown_node_is_read_before_its_peers_are_charged(limit, deleted):
    """It may be new, or have been deleted before this operator began."""
    world = gone_while_nobody_looked(maxRestarts=limit)
    machines = world.machines
    assert machines
    machines.truth = machines.guessed.clear if deleted else lambda: found_there(machines)
    world.end(0, 1, settle=False).end(2, 1)
    if limit == 0 and not deleted:
        assert world.phase == "Running", "node2 may still fall silent"
        assert world.wait(60).phase == "Failed"
    told = ("Infrastructure", "NodeLost") if deleted else ("User", "ExitCode1")
    assert (world.loss["class"], world.loss["reason"]) == told
    assert world.counts == ((1, 0, 1) if deleted else (min(limit, 1), min(limit, 1), 0))
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
    assert world.loss["class"] == "User"


@pytest.mark.fault("T13")
@pytest.mark.parametrize("deleted", [False, True])
def test_a_rank_that_its_program_has_ended_early_is_charged(deleted):
    """By sys.exit(0) on one rank, say: it would do so a hundred times, were nobody charged."""
    said = "rank 1 after step 12 ended with exit code 0 while others trained: then rank 0: 75"
    facts = {"version": 1, "kind": "peerLost", "round": 3, "step": 12, "exception": said}
    world = on_nodes(restart={"maxRestarts": 3})
    if deleted:
        world.terminate(1)
    world.end(0, 75, message=json.dumps(facts), settle=False).end(2, 75).wait(60)
    assert world.loss["class"] == ("Disruption" if deleted else "User")
    assert world.status["restarts"]["charged"] == int(not deleted)


def test_a_rank_that_ended_early_ends_no_job_while_a_machine_is_in_doubt():
    """It may have ended as its machine went: the charge would be final."""
    said = "rank 0 after step 12 ended with exit code 0 while others trained: then rank 2: 75"
    facts = {"version": 1, "kind": "peerLost", "round": 3, "step": 12, "exception": said}
    world = on_nodes(restart={"maxRestarts": 0}).end(0, 75, message=json.dumps(facts), settle=False)
    world.end(2, 75).wait(50)
    assert world.phase == "Running"
    world.fall_silent("node2")
    assert (world.phase, world.loss["reason"], world.counts) == (
        "Restarting",
        "NodeLost",
        (1, 0, 1),
    )


@pytest.mark.fault("T13")
@pytest.mark.parametrize("code", [75, 76])
@pytest.mark.parametrize("report", [True, False])
def test_a_replica_that_ended_early_is_named_when_the_others_fail(code, report):
    """With 0, which no failure is; of a program whose launchers have no hub in common."""
    told = '{"version":1,"kind":"success","round":0,"step":12}' if report else ""
    world = on_nodes(restart={"maxRestarts": 3}).end(1, 0, message=told)
    world.end(0, code, settle=False).end(2, code).wait(5)
    after = " after step 12" * report
    words = f"replica 1 ended with 0 (Succeeded){after} while others waited for them; then "
    assert words in world.condition("Running")["message"]
    assert world.loss["message"].startswith(words)
