"""Stories of a gang whose machine falls silent, told to the pure planner.

Replicas 0 and 2 run on node1, replica 1 on node2.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core.objects.nodes import OUT_OF_SERVICE, Lease, record
from support.world import START, Machines, World, job_object, kept_off, running, started

SNAPSHOT = {"path": "/snapshots", "volume": {"emptyDir": {}}}
FENCE = {"snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence", "afterSeconds": 30}}


def on_nodes(**spec: Any) -> tuple[World, Machines]:
    machines = Machines()
    return running(machines=machines, **spec), machines


def silent(**spec: Any) -> World:
    """As node2 has fallen silent."""
    return running(machines=Machines(), **spec).fall_silent("node2")


def test_fence_replaces_the_gang_once_the_node_was_silent_for_so_long():
    world = silent(**FENCE)
    assert world.wait(5).plan().requeue_after == 25
    world.wait(24.5).terminate(1)  # as the taint manager does
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    world.wait(0.5)
    assert world.log == [
        *("status Running 1", "status Running 1"),  # Stalled; replica 1 is not ready
        *("read node2", "status Restarting 2"),
        *(f"delete job-{replica} 1" for replica in range(3)),
        "status Starting 2",
        *(f"create job-{replica} 2" for replica in range(3)),
    ]
    loss = world.loss
    assert (loss["reason"], loss["class"]) == ("NodeLost", "Infrastructure")
    assert (loss["node"], loss["replica"], world.counts) == ("node2", 1, (1, 0, 1))


def away(world: World, *replicas: int) -> World:
    """As the hub has just said."""
    uids = frozenset(world.pods[f"job-{replica}"]["metadata"]["uid"] for replica in replicas)
    world.feedback = replace(world.feedback, away=uids, away_at=world.now)
    return world.settle()


@pytest.mark.fault("N21")
def test_a_pod_lost_to_its_hub_on_a_node_without_new_lease_is_given_up():
    """Long before Kubernetes calls the node not ready: new pods are kept off it until then."""
    world, machines = on_nodes(**FENCE)
    world.poll(holds=True).wait(2).log.clear()
    machines.leases["node2"] = Lease(14.9, 14.9)
    assert away(world, 1).log == ["list leases"]
    assert away(world.wait(3), 1).log.count("list leases") == 1, "again in 4 s"
    world.log.clear()
    machines.leases["node2"] = Lease(15.0, 10.0)
    away(world.wait(2), 1)
    assert world.log == [
        *("status Restarting 2", "delete job-1 1", "status Starting 2", "create job-1 2")
    ]
    loss = world.loss
    assert (loss["reason"], loss["class"], loss["replaced"]) == (
        "NodeSilent",
        "Infrastructure",
        True,
    )
    assert (loss["node"], world.counts) == ("node2", (1, 0, 1))
    assert kept_off(world.pods["job-1"]) == ["node2"]
    world.run().wait(400).end(1, 1).wait(301)
    assert kept_off(world.pods["job-1"]) == [], "by then the node has a taint, or has come back"


@pytest.mark.fault("N21", "A6")
@pytest.mark.parametrize(("lease", "spec", "who"), [
    (Lease(14.9, 14.9), FENCE, 1),
    (Lease(600, 9.9), FENCE, 1),  # the control plane was away, and is back for 10 s
    (Lease(), FENCE, 1),  # unknown, or without the right to list them
    (Lease(600, 600), {**FENCE, "nodeLost": {"policy": "Wait"}}, 1),
    (Lease(600, 600), FENCE, 0),  # another one's link is lost
    (Lease(600, 600), FENCE, None),
])  # fmt: skip
def test_neither_a_lost_link_nor_an_old_lease_alone_gives_a_pod_up(lease, spec, who):
    world, machines = on_nodes(**spec)
    machines.leases["node2"] = lease
    away(world, *(() if who is None else (who,)))
    if who == 1:  # an answer from before holds for nothing later
        machines.leases["node2"] = Lease(600, 600)
        machines.listed = world.now
        world.feedback = replace(world.feedback, away_at=world.now - timedelta(seconds=11))
        world.settle()
    assert (world.phase, world.status["attempt"], world.counts) == ("Running", 1, (0, 0, 0))


@pytest.mark.parametrize("policy", ["Fence", "Wait"])
def test_a_pod_that_ended_as_its_node_fell_silent_blocks_nothing(policy):
    """Deleted before it ended, it is removed by its kubelet only, and the barrier waits for it."""
    world, _ = on_nodes(snapshot=SNAPSHOT, nodeLost={"policy": policy, "afterSeconds": 30})
    world.graceful = True
    world.end(0, 1).end(1, 143).end(2, 143).finish_deletions("node1")
    world.fall_silent("node2").wait(60)
    if policy == "Wait":
        assert world.stalled == "NodeNotReady"
        assert "kubectl delete node node2" in world.condition("Stalled")["message"]
    else:
        assert world.attempts() == {2}


def test_fence_reads_the_node_before_it_gives_up_its_pods():
    world, machines = on_nodes(**FENCE)
    world.fall_silent("node2")
    machines.truth = machines.down.clear  # it has come back, no event told
    world.wait(31)
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    assert world.log[-2:] == ["read node2", "status Running 1"]
    assert world.stalled == ""


def test_fence_waits_when_no_worker_is_ready():
    world, machines = on_nodes(**FENCE)
    world.fall_silent("node1", "node2").wait(600)
    assert (world.phase, world.status["attempt"], world.stalled) == ("Running", 1, "NodesNotReady")
    assert "2 of 2 worker nodes are not ready" in world.condition("Stalled")["message"]
    del machines.down["node1"]
    assert world.settle().attempts() == {2}


@pytest.mark.parametrize(("down", "up", "waits"), [(6, 4, True), (1, 0, False), (5, 4, False)])
def test_fence_waits_while_most_nodes_are_silent(down, up, waits):
    """55 % of them, and more than two: the rule of Kubernetes' own node controller."""
    world, machines = on_nodes(**FENCE)
    machines.others_up, machines.others_down = up, down
    world.fall_silent("node2").wait(600)
    assert world.status["attempt"] == (1 if waits else 2)
    assert (world.stalled == "NodesNotReady") is waits


def test_what_was_cut_off_together_has_its_time_to_come_back():
    world, machines = on_nodes(**FENCE)
    machines.others_up, machines.others_down = 2, 5
    world.fall_silent("node2").wait(600)
    machines.others_up, machines.others_down = 7, 0
    machines.calm_since = world.now
    assert world.wait(29).status["attempt"] == 1
    assert world.stalled == "NodeNotReady"
    assert world.wait(1).status["attempt"] == 2


@pytest.mark.parametrize(("after", "least"), [(30, 30), (1, 20)])
def test_fence_counts_only_what_this_process_has_seen_without_a_gap(after, least):
    """A new operator, or one that was cut off: the nodes may be coming back at this moment."""
    spec = {"snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence", "afterSeconds": after}}
    world, machines = on_nodes(**spec)
    machines.down["node2"] = world.now - timedelta(seconds=600)
    assert world.sees_from_now().settle().wait(least - 1).status["attempt"] == 1
    assert world.plan().requeue_after == 1
    assert world.wait(1).status["attempt"] == 2


def test_wait_says_what_it_waits_for_and_what_a_person_can_do():
    world = silent()
    taint = "kubectl taint node node2 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    (said,) = world.told("NodeNotReady")
    assert (world.stalled, said) == ("NodeNotReady", world.condition("Stalled")["message"])
    assert f"kubectl delete node node2, or: {taint}" in said
    cut = "node node2 is not ready: if it is off for good: kubectl delete node node2"
    assert world.status["message"].startswith(cut)
    world.wait(30).terminate(1).wait(3600)
    assert world.status["attempt"] == 1, "it may train on"


@pytest.mark.fault("N6")
@pytest.mark.parametrize("back", [None, 120, 5], ids=["not yet", "since", "never was away"])
def test_a_node_that_was_lost_under_wait_is_named(back):
    """The kubelet is back, and ends the pod that the taint manager had removed meanwhile."""
    world, machines = on_nodes()
    world.fall_silent("node2").wait(60)
    removed = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
               "lastTransitionTime": world.now.isoformat()}  # fmt: skip
    world.terminate(1).wait(60)
    if back is not None:
        machines.down.clear()
        machines.back["node2"] = START + timedelta(seconds=back)
    world.end(1, 255, settle=False)
    world.pods["job-1"]["status"]["conditions"] = [removed]
    loss = world.settle().loss
    assert (loss["class"], loss["reason"]) == ("Disruption", "DeletionByTaintManager")
    said = loss.get("exception") == "node node2 was not ready, so Kubernetes removed the pod"
    assert said == (back != 5)
    assert loss["node"] == "node2"


@pytest.mark.parametrize("policy", ["Wait", "Fence"])
def test_out_of_service_is_the_word_of_an_administrator(policy):
    world, machines = on_nodes(snapshot=SNAPSHOT, nodeLost={"policy": policy, "afterSeconds": 3600})
    world.fall_silent("node1", "node2").terminate(1)
    machines.out_of_service.add("node2")
    world.settle()
    assert (world.status["attempt"], world.attempts()) == (2, {1}), "node1 is not given up"
    assert "job-1" not in world.pods


def test_a_node_of_which_no_watch_has_told_yet_is_no_trouble():
    """A new machine: its first pod may be told of before it."""
    world, machines = on_nodes()
    assert not world.node_gone("node2", guessed=True).settle().stalled
    machines.guessed.clear()
    assert world.settle().stalled == "NodeNotReady"
    # Else a user's failure is free on an autoscaled cluster, as often as a node is new.
    world, _ = on_nodes()
    loss = world.node_gone("node2", guessed=True).settle().end(0, 1).loss
    assert (loss["class"], loss["reason"], loss["replica"]) == ("User", "ExitCode1", 0)
    assert world.counts[1] == 1


def test_a_deleted_node_takes_its_pods_and_under_wait_if_they_are_left():
    world, _ = on_nodes(**FENCE)
    assert world.node_gone("node2").settle().attempts() == {2}, "at once"
    assert "does not exist any more" in world.loss["message"]
    world, _ = on_nodes()
    assert world.node_gone("node2").settle().status["attempt"] == 1
    assert world.wait(5).plan().requeue_after == 55
    world.wait(55)
    assert world.attempts() == {2}


@pytest.mark.parametrize("code", [1, 75, 76, 137])
def test_peers_that_die_of_a_silent_node_are_charged_to_nobody(code):
    world, machines = on_nodes()
    world.fall_silent("node2").end(0, code)
    assert (world.loss["reason"], world.counts) == ("NodeLost", (1, 0, 1))
    assert (world.phase, world.attempts()) == ("Restarting", {1}), "its pod is still there"
    machines.down.clear()
    assert world.finish_deletions().attempts() == {2}


@pytest.mark.fault("U5")
def test_a_pod_that_cannot_start_on_a_silent_node_is_charged_to_nobody():
    """When none is ready Kubernetes evicts nobody, so nothing else tells."""
    world = World(job_object(startupDeadlineSeconds=60), machines=Machines()).settle()
    world.run(0, 2).waiting(1, "ContainerCreating")
    world.fall_silent("node1", "node2").wait(60)
    assert (world.phase, world.loss["reason"]) == ("Restarting", "NodeLost")
    assert (world.status["attempt"], world.counts[1]) == (2, 0)


def test_the_barrier_under_fence_lets_go_of_a_node_that_falls_silent():
    world, _ = on_nodes(**FENCE)
    world.graceful = True
    world.end(0, 1).fall_silent("node2").finish_deletions("node1")
    assert (world.phase, world.attempts()) == ("Restarting", {1})
    world.wait(30)
    assert world.attempts() == {2}


def test_a_finished_replica_with_a_sidecar_is_not_lost_nor_in_the_way():
    world = on_nodes(**FENCE)[0].end(1, 0)
    world.pods["job-1"]["status"]["phase"] = "Running"  # its sidecar
    world.pods["job-1"]["spec"]["containers"].append({"name": "sidecar", "image": "i"})
    world.fall_silent("node2").wait(30)
    assert world.status["attempt"] == 1
    world.end(0, 1).wait(0)
    assert world.attempts() == {2}


@pytest.mark.parametrize("end", ["suspend", "fail"])
def test_pods_of_a_job_without_a_gang_go_by_force_too(end):
    world = silent(**FENCE, restart={"maxRestarts": 0})
    world.patch(suspend=True) if end == "suspend" else world.end(0, 2)
    assert "job-1" in world.pods
    world.wait(30)
    assert "job-1" not in world.pods


@pytest.mark.parametrize(("ttl", "left"), [(None, 25), (3600, 25), (9, 4)])
def test_an_ended_job_asks_to_be_looked_at_when_its_pods_may_go_by_force(ttl, left):
    """Nothing else would bring that look: the node tells nothing any more."""
    fields = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    world = silent(**FENCE, **fields).end(0, 2).wait(5)
    assert (world.phase, world.plan().requeue_after) == ("Failed", left)
    if left == 25:
        assert "job-1" not in world.wait(left).pods


@pytest.mark.parametrize("end", ["suspend", "fail"])
def test_a_pod_that_a_finalizer_holds_is_not_deleted_again_and_again(end):
    world = silent(**FENCE, restart={"maxRestarts": 0})
    world.terminate(1, grace=0)  # by force, and yet it stays
    world.patch(suspend=True) if end == "suspend" else world.end(0, 2)
    world.wait(60)
    assert "job-1" in world.pods
    assert not [line for line in world.log if line.startswith(("read", "delete job-1"))]


def test_fence_without_rights_is_told_and_behaves_as_wait():
    world = running(**FENCE)
    told = world.condition("Unsupported")
    assert (told["status"], told["reason"]) == ("True", "NodesNotReadable")
    assert "rbac.nodes=true" in told["message"]
    world.machines = Machines()
    world.wait(3)
    assert world.condition("Unsupported")["status"] == "False"


def test_fence_without_snapshot_is_refused():
    world = started(nodeLost={"policy": "Fence"})
    assert "Fence needs spec.snapshot" in world.condition("Invalid")["message"]


@pytest.mark.parametrize(
    ("status", "ready"), [("True", True), ("False", False), ("Unknown", False), (None, False)]
)
def test_what_is_kept_of_a_node(status, ready):
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
