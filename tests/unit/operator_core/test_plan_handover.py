"""A node is about to go: its pods are replaced before they are lost, and all ranks save first.

Replicas 0 and 2 run on node1, replica 1 on node2.
"""

from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects.nodes import Signals, record, signals_of
from support.world import Machines, World, intent, kept_off, running

DRAINED = "taint karpenter.sh/disrupted"
KERNEL = "condition KernelDeadlock"


def holding(**spec: Any) -> World:
    """A gang on two nodes, whose launchers have said that they hold."""
    world = running(machines=Machines(), graceful=True, **spec).poll(holds=True, step=1).wait(2)
    for past in (world.log, world.events):
        past.clear()
    return world


def signal(world: World, **nodes: str) -> World:
    world.machines.signals = nodes
    return world.settle()


def graces(world: World) -> dict[str, int]:
    """Grace periods of the pods that are being deleted."""
    found = {name: pod["metadata"] for name, pod in world.pods.items()}
    return {
        name: meta["deletionGracePeriodSeconds"]
        for name, meta in found.items()
        if "deletionTimestamp" in meta
    }


@pytest.mark.fault("N20")
@pytest.mark.parametrize(
    ("node", "replicas", "births", "replaced"),
    [("node2", [1], "1:2", "replica 1"), ("node1", [0, 2], "0:2,2:2", "replicas 0,2")],
)
def test_the_pods_of_a_node_about_to_go_save_and_are_replaced_elsewhere(
    node, replicas, births, replaced
):
    world = signal(holding(), **{node: DRAINED})
    names = [f"job-{replica}" for replica in replicas]
    assert world.log == [
        f"read {node}",
        "status Restarting 2",
        *(f"delete {name} 1" for name in names),
    ]
    assert graces(world) == dict.fromkeys(names, 30)
    assert (intent(world), world.counts) == ((2, 1, births), (1, 0, 1))
    assert world.status["restarts"]["replaced"] == 1
    assert (world.loss["class"], world.loss["reason"]) == ("Disruption", "HandedOver")
    assert world.loss["node"] == node
    assert (world.loss["chargedTo"], world.loss["charge"]) == ("maxDisruptions", 1)
    assert [event.reason for event in world.events] == ["HandedOver"]
    (told,) = world.told("HandedOver")
    assert f"{node} is about to go ({DRAINED})" in told
    assert f"replacing {replaced} (disruption 1 of at most 100)" in told
    assert world.status["avoidedNodes"] == [node]
    assert world.status["handedOver"] == [f"{node}: {DRAINED}"]
    world.finish_deletions()
    assert world.phase == "Starting"
    assert all(kept_off(world.pods[name]) == [node] for name in names)
    assert world.run().phase == "Running"
    assert world.wait(600).counts == (1, 0, 1), "no other node was left: it stays"
    assert (len(world.pods), world.told("HandedOver")) == (3, [told])


def test_only_a_pod_that_saves_gets_the_time_for_it():
    world = signal(holding(), node2=DRAINED).end(1, 143, settle=False)
    world.pods["job-1"]["status"]["phase"] = "Running"  # a sidecar works
    world.settle()
    assert graces(world) == {"job-1": 2}, "its sidecars have nothing to save"
    world = signal(holding(), node2=DRAINED).wait(1).end(0, 137)
    assert (intent(world), graces(world)) == ((3, 1, "0:3,1:3"), {"job-0": 0, "job-1": 2})


def test_a_decision_outlives_the_operator():
    world = holding()
    world.machines.signals = {"node2": DRAINED}
    world.until(act.DeletePod)
    world.machines.signals = {}
    assert graces(world.restart_operator().settle()) == {"job-1": 30}
    assert world.finish_deletions().run().phase == "Running"
    assert world.counts == (1, 0, 1)


def test_without_room_elsewhere_all_restart_anywhere_and_stay():
    world = signal(holding(), node2=KERNEL).finish_deletions()
    no_room = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    world.pods["job-1"]["status"] = {"phase": "Pending", "conditions": [no_room]}
    world.wait(30)
    assert "kept off node2" in world.condition("Stalled")["message"]
    world.wait(270).finish_deletions()
    assert (intent(world), world.counts) == ((3, 3, ""), (1, 0, 1))
    assert "avoidedNodes" not in world.status
    world.run().poll(holds=True, step=9, snapshotStep=9).wait(600)
    assert (world.phase, intent(world), world.counts[0]) == ("Running", (3, 3, ""), 1)


def test_a_signal_that_is_gone_when_the_node_is_read_brings_nothing_about():
    world = holding()
    world.machines.truth = world.machines.signals.clear
    world.machines.signals["node2"] = DRAINED
    world.settle().wait(600)
    assert (world.log, world.phase, world.events) == (["read node2"], "Running", [])


def test_on_a_silent_node_nothing_could_be_ended():
    world = holding().fall_silent("node2")
    world.log.clear()
    assert (signal(world, node2=KERNEL).wait(60).log, world.status["attempt"]) == ([], 1)
    world.machines.down.clear()
    assert intent(world.settle()) == (2, 1, "1:2")


def test_a_read_of_long_ago_proves_nothing():
    world = holding(replicas=3)
    world.machines.read["node2"] = world.now
    world.wait(11)
    assert signal(world, node2=DRAINED).log[0] == "read node2"


def test_two_nodes_at_once_are_one_disruption():
    world = holding(replicas=5)
    world.pods["job-4"]["spec"]["nodeName"] = "node3"
    signal(world, node1=DRAINED, node2=KERNEL)
    assert world.log[:2] == ["read node1 node2", "status Restarting 2"]
    assert (intent(world), world.counts) == ((2, 1, "0:2,1:2,2:2,3:2"), (1, 0, 1))
    assert world.status["handedOver"] == [f"node1: {DRAINED}", f"node2: {KERNEL}"]
    assert world.finish_deletions().run().phase == "Running"


def test_the_next_node_waits_until_the_gang_has_progressed():
    """Else gangs would wander about where a list names what all nodes show."""
    world = signal(holding(), node2=DRAINED).finish_deletions().run()
    signal(world, node1=DRAINED, node2=KERNEL)
    world.wait(60)
    assert world.counts[0] == 1
    world.pods["job-1"]["spec"]["nodeName"] = "node3"
    world.poll(holds=True, step=9, snapshotStep=9).wait(2)
    assert (intent(world), world.counts) == ((3, 1, "0:3,1:2,2:3"), (2, 0, 1))


@pytest.mark.parametrize(
    ("spec", "holds"),
    [
        ({}, False),
        ({"restart": {"replaceSeconds": 0}}, True),
        ({"restart": {"inPlace": {"enabled": False}}}, True),
        ({"restart": {"maxDisruptions": 0}}, True),
        ({"restart": {"rules": [{"reasons": ["Disruption"], "action": "Fail"}]}}, True),
        ({"replicas": 1}, True),
    ],
)
def test_a_gang_that_cannot_hand_over_trains_on_and_says_so_once(spec, holds):
    world = running(machines=Machines(), **spec).poll(holds=holds, step=1).wait(2)
    signal(world, node1=DRAINED)
    assert world.wait(50).status["attempt"] == 1
    world.wait(20).wait(600)
    assert (world.phase, intent(world), world.counts) == ("Running", (1, 1, ""), (0, 0, 0))
    (told,) = world.told("NotHandedOver")
    assert f"node1 is about to go ({DRAINED})" in told
    assert "avoidedNodes" not in world.status


@pytest.mark.parametrize("holds", [True, False])
def test_an_older_crd_that_forgets_what_was_done_is_not_asked_to_do_it(holds):
    world = running(machines=Machines())
    world.api.prunes = frozenset({"births", "holds", "handedOver"})
    world.poll(holds=holds, step=1).wait(100)
    signal(world, node1=DRAINED)
    for step in range(2, 9):
        world.wait(15).poll(holds=holds, step=step)
    times = 0 if holds else 1  # that is news to it: the first write shows what is dropped
    assert (world.phase, len(world.told("NotHandedOver"))) == ("Running", times)


def test_a_list_that_names_what_many_nodes_show_comes_to_an_end():
    world = holding(replicas=3)
    world.job["status"]["handedOver"] = [f"n{number}: cordon" for number in range(31)]
    signal(world, node1=DRAINED, node2=DRAINED)
    assert intent(world) == (2, 1, "0:2,2:2"), "there is room for one node"
    world.finish_deletions().run().poll(holds=True, step=9, snapshotStep=9).wait(600)
    assert (world.phase, world.counts[0], len(world.status["handedOver"])) == ("Running", 1, 32)


def test_when_every_node_is_about_to_go_nobody_could_hold():
    world = signal(holding(), node1=DRAINED, node2=DRAINED)
    assert (world.phase, intent(world)) == ("Running", (1, 1, ""))
    assert len(world.told("NotHandedOver")) == 1


def test_a_pod_that_is_on_its_way_out_is_lost_as_ever():
    world = holding().terminate(1)
    signal(world, node1=DRAINED, node2=DRAINED)
    assert (world.log, world.phase) == ([], "Running")
    assert world.end(1, 143).loss["reason"] == "PodDeleted"
    assert intent(world) == (2, 1, "1:2")


def test_a_resume_begins_anew():
    world = signal(holding(), node2=DRAINED).finish_deletions().run()
    world.patch(suspend=True).finish_deletions()
    world.patch(suspend=False).run().poll(holds=True).wait(2)
    assert world.status["handedOver"] == [f"node2: {DRAINED}"], "its pod is there again"
    assert world.counts == (2, 0, 2)


def test_a_recovery_is_counted_from_the_decision():
    world = holding().poll(holds=True, step=5).wait(60)
    world.measurements.clear()
    signal(world, node2=DRAINED).wait(4).finish_deletions().run()
    (seconds,) = [m.value for m in world.measurements if m.name == "recovery_seconds"]
    assert seconds == 4


@pytest.mark.parametrize(
    ("spec", "conditions", "found"),
    [
        ({}, {}, ""),
        ({}, {"KernelDeadlock": "True"}, KERNEL),
        ({}, {"KernelDeadlock": "False"}, ""),
        ({}, {"KernelDeadlock": "Unknown"}, ""),
        ({}, {"HardwareReady": "False"}, "condition HardwareReady=False"),
        ({}, {"HardwareReady": "True"}, ""),
        ({"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, {}, DRAINED),
        ({"taints": [{"key": "other"}, "odd"]}, {}, ""),
        ({"unschedulable": True}, {}, "cordon"),
        ({"unschedulable": "yes"}, {}, ""),
    ],
)
def test_what_says_that_a_node_is_about_to_go(spec, conditions, found):
    listed = [{"type": name, "status": status} for name, status in conditions.items()]
    node = {"metadata": {"name": "n"}, "spec": spec, "status": {"conditions": [*listed, "odd"]}}
    signals = Signals(
        ("KernelDeadlock", "HardwareReady=False"), ("karpenter.sh/disrupted",), cordon=True
    )
    assert record(node, signals).signal == found
    assert record(node).signal == ""
    raw = {"conditions": ["KernelDeadlock", "HardwareReady=False"], "cordon": True}
    assert signals_of(raw | {"taints": ["karpenter.sh/disrupted", 3]}) == signals
