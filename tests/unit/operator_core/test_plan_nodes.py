"""Stories of a gang whose machine falls silent, told to the pure planner.

Replicas 0 and 2 run on node1, replica 1 on node2.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ddpjob_operator.core.objects.nodes import OUT_OF_SERVICE, record
from support.world import Machines, World, job_object

SNAPSHOT = {"path": "/snapshots", "volume": {"emptyDir": {}}}
FENCE = {"snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence", "afterSeconds": 30}}


def running(**spec: object) -> World:
    world = World(job_object(**spec), machines=Machines()).settle().run()
    world.log.clear()
    world.events.clear()
    return world


def fall_silent(world: World, *nodes: str) -> World:
    assert world.machines
    world.machines.down |= dict.fromkeys(nodes, world.now)
    return world.settle()


def evict(world: World, *replicas: int) -> World:
    """As the taint manager does 30 s later: deleted, and never gone."""
    for replica in replicas:
        world.terminate(replica)
    return world


def test_fence_replaces_the_gang_once_the_node_was_silent_for_so_long():
    world = fall_silent(running(**FENCE), "node2")
    assert world.wait(5).plan().requeue_after == 25
    evict(world.wait(24.5), 1)
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    world.wait(0.5)
    assert world.log == [
        "status Running 1",  # Stalled
        "status Running 1",  # replica 1 is not ready
        "read node2",
        "status Restarting 2",
        "delete job-0 1",
        "delete job-1 1",
        "delete job-2 1",
        "status Starting 2",
        "create job-0 2",
        "create job-1 2",
        "create job-2 2",
    ]
    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["class"]) == ("NodeLost", "Infrastructure")
    assert (failure["node"], failure["replica"]) == ("node2", 1)
    assert world.status["restarts"]["charged"] == 0


@pytest.mark.parametrize("policy", ["Fence", "Wait"])
def test_a_pod_that_ended_as_its_node_fell_silent_holds_nothing_up_for_ever(policy: str):
    """Deleted before it ended, it is removed by its kubelet only, and the barrier waits for it."""
    world = running(snapshot=SNAPSHOT, nodeLost={"policy": policy, "afterSeconds": 30})
    world.graceful = True
    world.end(0, 1).end(1, 143).end(2, 143).finish_deletions_on("node1")
    fall_silent(world, "node2").wait(60)
    if policy == "Wait":
        assert world.condition("Stalled")["reason"] == "NodeNotReady"
        assert "kubectl delete node node2" in world.condition("Stalled")["message"]
    else:
        assert world.attempts() == {2}


def test_fence_reads_the_node_before_it_gives_up_its_pods():
    world = fall_silent(running(**FENCE), "node2")
    assert world.machines
    world.machines.truth = world.machines.down.clear  # it has come back, no event told
    world.wait(31)
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    assert world.log[-2:] == ["read node2", "status Running 1"]
    assert world.condition("Stalled")["status"] == "False"


def test_fence_waits_when_no_worker_is_ready():
    world = fall_silent(running(**FENCE), "node1", "node2").wait(600)
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    told = world.condition("Stalled")
    assert told["reason"] == "NodesNotReady"
    assert "2 of 2 worker nodes are not ready" in told["message"]
    assert world.machines
    del world.machines.down["node1"]
    assert world.settle().attempts() == {2}


@pytest.mark.parametrize(("down", "up", "waits"), [(6, 4, True), (1, 0, False), (5, 4, False)])
def test_fence_waits_while_most_nodes_are_silent(down: int, up: int, waits: bool):
    """55 % of them, and more than two: the rule of Kubernetes' own node controller."""
    world = running(**FENCE)
    assert world.machines
    world.machines.others_up, world.machines.others_down = up, down
    fall_silent(world, "node2").wait(600)
    assert world.status["attempt"] == (1 if waits else 2)
    assert (world.condition("Stalled").get("reason") == "NodesNotReady") is waits


def test_what_was_cut_off_together_has_its_time_to_come_back():
    world = running(**FENCE)
    assert world.machines
    world.machines.others_up, world.machines.others_down = 2, 5
    fall_silent(world, "node2").wait(600)
    world.machines.others_up, world.machines.others_down = 7, 0
    world.machines.calm_since = world.now
    assert world.wait(29).status["attempt"] == 1
    assert world.condition("Stalled")["reason"] == "NodeNotReady"
    assert world.wait(1).status["attempt"] == 2


@pytest.mark.parametrize(("after", "least"), [(30, 30), (1, 20)])
def test_fence_counts_only_what_this_process_has_seen_without_a_gap(after: int, least: int):
    """A new operator, or one that was cut off: the nodes may be coming back at this moment."""
    spec = {"snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence", "afterSeconds": after}}
    world = running(**spec)
    assert world.machines
    world.machines.down["node2"] = world.now - timedelta(seconds=600)
    world.feedback = replace(world.feedback, seen_since=world.now)
    assert world.settle().wait(least - 1).status["attempt"] == 1
    assert world.plan().requeue_after == 1
    assert world.wait(1).status["attempt"] == 2


def test_wait_says_what_it_waits_for_and_what_a_person_can_do():
    world = fall_silent(running(), "node2")
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "NodeNotReady")
    taint = "kubectl taint node node2 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    assert taint in stalled["message"]
    assert "kubectl delete node node2" in stalled["message"]
    assert [event.reason for event in world.events] == ["NodeNotReady"]
    evict(world.wait(30), 1).wait(3600)
    assert world.status["attempt"] == 1, "it may train on"


@pytest.mark.parametrize("policy", ["Wait", "Fence"])
def test_out_of_service_is_the_word_of_an_administrator(policy: str):
    world = running(snapshot=SNAPSHOT, nodeLost={"policy": policy, "afterSeconds": 3600})
    evict(fall_silent(world, "node1", "node2"), 1)
    assert world.machines
    world.machines.out_of_service.add("node2")
    world.settle()
    assert (world.status["attempt"], world.attempts()) == (2, {1}), "node1 is not given up"
    assert "job-1" not in world.pods


def test_a_node_of_which_no_watch_has_told_yet_is_no_trouble():
    """A new machine: its first pod may be told of before it."""
    world = running()
    assert world.machines
    world.machines.gone["node2"] = world.now
    world.machines.guessed.add("node2")
    world.settle()
    assert (world.condition("Stalled") or {"status": "False"})["status"] == "False"
    world.machines.guessed.clear()
    world.settle()
    assert world.condition("Stalled")["reason"] == "NodeNotReady"


def test_what_fails_beside_a_node_of_which_no_watch_has_told_yet_is_charged_to_the_program():
    """On an autoscaled cluster a failure of the user's cost nothing, as often as a node was new."""
    world = running()
    assert world.machines
    world.machines.gone["node2"] = world.now
    world.machines.guessed.add("node2")
    world.settle().end(0, 1)
    failure = world.status["lastFailure"]
    assert (failure["class"], failure["reason"], failure["replica"]) == ("User", "ExitCode1", 0)
    assert world.status["restarts"]["charged"] == 1


def test_a_deleted_node_takes_its_pods_along_at_once_under_fence():
    world = running(**FENCE)
    assert world.machines
    world.machines.gone["node2"] = world.now
    assert world.settle().attempts() == {2}
    assert "does not exist any more" in world.status["lastFailure"]["message"]


def test_a_deleted_node_takes_its_pods_along_under_wait_if_kubernetes_leaves_them():
    world = running()
    assert world.machines
    world.machines.gone["node2"] = world.now
    assert world.settle().status["attempt"] == 1
    assert world.wait(5).plan().requeue_after == 55
    world.wait(55)
    assert world.attempts() == {2}


@pytest.mark.parametrize("code", [1, 75])
def test_peers_that_die_of_a_silent_node_are_charged_to_nobody(code: int):
    world = fall_silent(running(), "node2").end(0, code)
    assert world.status["lastFailure"]["reason"] == "NodeLost"
    assert world.status["restarts"]["charged"] == 0
    assert world.phase == "Restarting", "its pod is still there"
    assert world.attempts() == {1}
    assert world.machines
    world.machines.down.clear()
    assert world.finish_deletions().attempts() == {2}


@pytest.mark.fault("U5")
def test_a_pod_that_cannot_start_since_its_node_is_silent_is_charged_to_nobody():
    """When none is ready Kubernetes evicts nobody, so nothing else tells."""
    world = World(job_object(startupDeadlineSeconds=60), machines=Machines()).settle()
    world.run(0, 2).waiting(1, "ContainerCreating")
    fall_silent(world, "node1", "node2").wait(60)
    assert (world.phase, world.status["lastFailure"]["reason"]) == ("Restarting", "NodeLost")
    assert (world.status["attempt"], world.status["restarts"]["charged"]) == (2, 0)


def test_the_barrier_under_fence_lets_go_of_a_node_that_falls_silent_during_it():
    world = running(**FENCE)
    world.graceful = True
    world.end(0, 1)
    fall_silent(world, "node2").finish_deletions_on("node1")
    assert (world.phase, world.attempts()) == ("Restarting", {1})
    world.wait(30)
    assert world.attempts() == {2}


def test_a_finished_replica_with_a_sidecar_is_not_lost_but_does_not_block_either():
    world = running(**FENCE).end(1, 0)
    world.pods["job-1"]["status"]["phase"] = "Running"  # its sidecar
    world.pods["job-1"]["spec"]["containers"].append({"name": "sidecar", "image": "i"})
    fall_silent(world, "node2").wait(30)
    assert world.status["attempt"] == 1
    world.end(0, 1).wait(0)
    assert world.attempts() == {2}


@pytest.mark.parametrize("end", ["suspend", "fail"])
def test_pods_of_a_job_without_a_gang_go_by_force_too(end: str):
    world = fall_silent(running(**FENCE, restart={"maxRestarts": 0}), "node2")
    if end == "suspend":
        world.patch(suspend=True)
    else:
        world.end(0, 2)
    assert "job-1" in world.pods
    world.wait(30)
    assert "job-1" not in world.pods


@pytest.mark.parametrize(("ttl", "left"), [(None, 25), (3600, 25), (9, 4)])
def test_an_ended_job_asks_to_be_looked_at_when_its_pods_may_go_by_force(
    ttl: int | None, left: float
):
    """Nothing else would bring that look: the node tells nothing any more."""
    fields = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    world = fall_silent(running(**FENCE, **fields), "node2").end(0, 2).wait(5)
    assert (world.phase, world.plan().requeue_after) == ("Failed", left)
    if left == 25:
        assert "job-1" not in world.wait(left).pods


@pytest.mark.parametrize("end", ["suspend", "fail"])
def test_a_pod_that_a_finalizer_holds_is_not_deleted_again_and_again(end: str):
    world = fall_silent(running(**FENCE, restart={"maxRestarts": 0}), "node2")
    world.terminate(1, grace=0)  # by force, and yet it stays
    if end == "suspend":
        world.patch(suspend=True)
    else:
        world.end(0, 2)
    world.wait(60)
    assert "job-1" in world.pods
    assert not [line for line in world.log if line.startswith(("read", "delete job-1"))]


def test_fence_without_rights_is_told_and_behaves_as_wait():
    world = World(job_object(**FENCE)).settle().run()
    told = world.condition("Unsupported")
    assert (told["status"], told["reason"]) == ("True", "NodesNotReadable")
    assert "rbac.nodes=true" in told["message"]
    world.machines = Machines()
    world.wait(3)
    assert world.condition("Unsupported")["status"] == "False"


def test_fence_without_snapshot_is_refused():
    world = World(job_object(nodeLost={"policy": "Fence"})).settle()
    assert "Fence needs spec.snapshot" in world.condition("Invalid")["message"]


@pytest.mark.parametrize(
    ("status", "ready"), [("True", True), ("False", False), ("Unknown", False), (None, False)]
)
def test_what_is_kept_of_a_node(status: str | None, ready: bool):
    at = "2026-01-01T00:00:00Z"
    condition = {"type": "Ready", "status": status, "lastTransitionTime": at}
    found = record(
        {
            "metadata": {"name": "n"},
            "spec": {"taints": [{"key": OUT_OF_SERVICE}, "odd"]},
            "status": {"conditions": [{"type": "DiskPressure", "status": "True"}, condition]},
        }
    )
    assert (found.ready, found.out_of_service, found.control_plane) == (ready, True, False)
    assert found.since is not None
