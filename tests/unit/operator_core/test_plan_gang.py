"""Stories of gangs that Kubernetes places as one PodGroup: whole or not at all."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects.nodes import Lease
from support.world import Machines, World, job_object, refusal

MISFIT = "0/2 nodes are available: 2 Insufficient cpu."
OTHERS = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled"
#: The same of Kubernetes 1.37.
OTHERS_TOO = (
    "pod group is unschedulable, pod group is unschedulable, 0/1 placements are available, first"
    " placement status: minCount (3) cannot be satisfied: 2 scheduled, 0 remaining"
)
HOUR = 3600.0
TEMPLATE = {"spec": {"containers": [{"name": "trainer", "image": "trainer"}]}}


def native(*, api: str = "v1beta1", **spec: Any) -> World:
    return World(job_object(**spec), gang_api=api)


def waiting(*, misfit: int = 1, **spec: Any) -> World:
    """All pods are there and one of them fits nowhere, so that none has a node."""
    world = native(**spec).settle()
    for replica in range(3):
        message = MISFIT if replica == misfit else OTHERS
        conditions = [{"type": "PodScheduled", "status": "False", "message": message}]
        world.pods[f"job-{replica}"]["status"] = {"phase": "Pending", "conditions": conditions}
    return world.wait(6)


def place(world: World, *replicas: int) -> World:
    for replica in replicas:
        pod = world.pods[f"job-{replica}"]
        pod["spec"]["nodeName"] = "node1"
        pod["status"] = {"phase": "Pending"}
    return world.settle()


def groups_of(world: World) -> set[str]:
    """The groups that pods name; "" for pods without one."""
    named = (pod["spec"].get("schedulingGroup") or {} for pod in world.pods.values())
    return {group.get("podGroupName", "") for group in named}


@pytest.mark.parametrize(
    ("api", "whole"), [("v1beta1", {"all": {}}), ("v1alpha2", "PodGroup")], ids=str
)
def test_the_group_comes_before_the_first_pod_and_all_pods_name_it(api, whole):
    scheduling = {"topologyKey": "rack", "priorityClassName": "high"}
    world = native(api=api, scheduling=scheduling).settle()
    name = world.status["podGroup"]
    assert name == "job-uid-of-j-1"
    assert groups_of(world) == {name}
    assert world.log.index(f"create group {name}") < world.log.index("create job-0 1")
    body = world.groups[name]
    assert body["apiVersion"] == f"scheduling.k8s.io/{api}"
    assert body["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 3}},
        "disruptionMode": whole,
        "priorityClassName": "high",
        "schedulingConstraints": {"topology": [{"key": "rack"}]},
    }
    assert {pod["spec"]["priorityClassName"] for pod in world.pods.values()} == {"high"}


@pytest.mark.parametrize(
    "spec",
    [
        {"scheduling": {"gang": "None"}},
        {"replicas": 1},
        {"template": {"spec": {**TEMPLATE["spec"], "schedulerName": "volcano"}}},
        {"template": {"spec": {**TEMPLATE["spec"], "nodeName": "node1"}}},
    ],
    ids=["none", "one pod", "another scheduler", "a node by name"],
)
def test_auto_leaves_the_group_out_where_it_does_nothing(spec):
    world = native(**spec).settle()
    assert groups_of(world) == {""}
    assert (world.groups, world.status.get("podGroup")) == ({}, None)


def test_gang_auto_uses_a_pod_group_from_the_first_attempt_with_the_api():
    world = native(api="").settle().run()
    assert groups_of(world) == {""}
    world.gang_api = "v1beta1"
    world.settle().end(1, 1)
    assert world.status["attempt"] == 2
    assert groups_of(world) == {"job-uid-of-j-2"}


@pytest.mark.parametrize("scheduling", [{"gang": "Native"}, {"topologyKey": "rack"}], ids=str)
def test_gang_native_waits_for_the_api_without_a_charge(scheduling):
    world = native(api="", scheduling=scheduling).settle()
    world.wait(HOUR)
    assert (world.phase, world.stalled, world.pods) == ("Pending", "GangUnavailable", {})
    assert "apply it again with gang None" in world.condition("Stalled")["message"]
    assert world.counts == (0, 0, 0)
    world.gang_api = "v1alpha2"
    world.settle().run()
    assert (world.phase, world.stalled) == ("Running", "")


def test_a_waiting_group_is_never_given_back_and_says_who_does_not_fit():
    world = waiting()
    assert (world.phase, world.stalled) == ("Starting", "Unschedulable")
    assert MISFIT in world.condition("Stalled")["message"]
    assert "job-1" in world.condition("Stalled")["message"]
    for _ in range(24):
        world.wait(HOUR)
    assert (world.phase, world.status["attempt"], world.counts) == ("Starting", 1, (0, 0, 0))
    assert len(world.told("Unschedulable")) == 1


def test_the_startup_deadline_counts_from_the_placement():
    world = waiting(startupDeadlineSeconds=100).wait(HOUR)
    place(world, 0, 1, 2)
    world.wait(99)
    assert world.phase == "Starting"
    world.wait(2)
    assert world.loss["reason"] == "StartupDeadlineExceeded"
    assert world.counts[1] == 1


def test_pods_placed_one_by_one_are_released_as_without_a_group():
    world = waiting(startupDeadlineSeconds=100).wait(HOUR)
    place(world, 0)
    world.wait(99)
    assert world.phase == "Starting"
    world.wait(2)
    assert (world.phase, world.stalled, world.counts) == ("Pending", "Unschedulable", (0, 0, 0))


def test_a_restart_takes_a_new_group_and_removes_the_old_one():
    world = native().settle().run().end(1, 1)
    assert (world.status["attempt"], set(world.groups)) == (2, {"job-uid-of-j-2"})
    assert groups_of(world) == {"job-uid-of-j-2"}
    assert world.log.index("remove groups") < world.log.index("create group job-uid-of-j-2")


def test_a_replaced_pod_joins_the_group_of_the_others():
    world = native().settle().run().poll(holds=True).wait(2)
    world.vanish(1)
    assert world.status["attempt"] == 2
    assert world.status["membersSince"] == 1
    assert groups_of(world) == {"job-uid-of-j-1"}
    assert set(world.groups) == {"job-uid-of-j-1"}
    world.run()
    assert (world.phase, world.status["podGroup"]) == ("Running", "job-uid-of-j-1")


def test_pods_that_stand_by_belong_to_no_group():
    world = native(standby=1, scheduling={"priorityClassName": "high"}).settle().run()
    world.poll(holds=True).wait(2)
    assert "schedulingGroup" not in world.pods["job-3"]["spec"]
    assert world.groups["job-uid-of-j-1"]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3


@pytest.mark.parametrize("end", ["suspended", "succeeded", "failed"])
def test_the_group_goes_with_its_attempt(end):
    world = native(restart={"maxRestarts": 0}).settle().run()
    if end == "suspended":
        world.patch(suspend=True)
    else:
        world.end(0, 0).end(1, 0).end(2, 0) if end == "succeeded" else world.end(1, 1)
    assert (world.groups, world.status.get("podGroup")) == ({}, None)
    removed = world.log.count("remove groups")
    world.restart_operator().wait(HOUR)
    assert world.log.count("remove groups") == removed == 1, "the status tells that it is done"
    if end == "suspended":
        world.patch(suspend=False)
        assert groups_of(world) == {"job-uid-of-j-2"}


def test_the_group_goes_before_a_job_whose_time_to_live_is_over():
    world = native(ttlSecondsAfterFinished=0).settle().run().end(0, 0).end(1, 0)
    world.end(2, 0, settle=False)
    while "delete job" not in world.log:
        world.carry_out(*world.plan().actions)
    assert world.log.index("remove groups") < world.log.index("delete job")


@pytest.mark.parametrize("first", ["ended", "gone"])
def test_a_preempted_group_leaves_the_room_to_those_it_was_taken_for(first):
    """The first pod may be gone before anybody has seen its condition."""
    world = native().settle().run().poll(holds=True).wait(2)
    for pod in world.pods.values():
        taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        pod["status"] = {**pod["status"], "conditions": [taken]}
    world.end(0, 143) if first == "ended" else world.vanish(0)
    assert (world.status["attempt"], world.status["membersSince"]) == (2, 2)
    assert world.pause() == 15.0
    assert world.counts == (1, 0, 1)
    assert world.pods == {}
    world.wait(16)
    assert groups_of(world) == {"job-uid-of-j-2"}


@pytest.mark.parametrize("taken", ["whole", "one"])
def test_preempted_pods_without_a_group_leave_the_room_for_as_long(taken):
    """A preempting pod is not bound yet, and of a preempting gang only some are."""
    world = World(job_object(scheduling={"gang": "None"})).settle().run()
    world.poll(holds=taken == "one").wait(2)
    told = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    world.pods["job-1"]["status"] = {**world.pods["job-1"]["status"], "conditions": [told]}
    world.vanish(0)
    assert world.pause() == 15.0
    since = {"whole": 2, "one": 1}[taken]
    assert (world.status["attempt"], world.status["membersSince"]) == (2, since)


@pytest.mark.parametrize("when", ["group", "pod"])
def test_auto_goes_on_without_a_group_that_cannot_be_had_whole(when):
    world, why = native(), "the API server drops spec.disruptionMode"
    if when == "group":
        world.no_gang = why
        world.settle()
    else:
        world.refuse = lambda action: _dropped(world, why)
        world.settle()
    assert groups_of(world) <= {"", "job-uid-of-j-1"}
    assert (world.groups, world.status.get("podGroup")) == ({}, None)
    assert [why in message for message in world.told("GangUnavailable")] == [True]
    world.run()
    assert (world.phase, world.counts) == ("Running", (0, 0, 0))


def _dropped(world: World, why: str) -> None:
    """As the executor learns it from the answer to the first pod's creation."""
    world.feedback = replace(world.feedback, no_gang=(world.status["attempt"], why))


def test_gang_native_retries_a_refused_group_with_a_reason():
    world = native(scheduling={"gang": "Native"})
    world.no_gang = "podgroups is forbidden"
    world.settle()
    assert (world.phase, world.stalled, world.pods) == ("Pending", "GangUnavailable", {})
    assert "podgroups is forbidden" in world.condition("Stalled")["message"]
    world.no_gang = ""
    world.wait(HOUR).run()
    assert (world.phase, world.counts) == ("Running", (0, 0, 0))


def test_a_group_without_room_elsewhere_uses_avoided_nodes_again():
    world = native(startupDeadlineSeconds=100).settle().run().end(0, 74)
    assert world.status["avoidedNodes"] == ["node1"]
    conditions = [{"type": "PodScheduled", "status": "False", "message": MISFIT}]
    for pod in world.pods.values():
        pod["status"] = {"phase": "Pending", "conditions": conditions}
    world.wait(101)
    assert (world.phase, world.status.get("avoidedNodes")) == ("Pending", None)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_waiting_group_that_a_stranger_removed_is_made_again(restarted):
    world = waiting()
    if restarted:  # another process has made it
        world.restart_operator()
    name = world.status["podGroup"]
    world.groups.clear()
    for _ in range(3):
        world.wait(61)
    assert set(world.groups) == {name}


@pytest.mark.parametrize("gang", ["Auto", "Native"])
@pytest.mark.parametrize("alone", [[], [0]], ids=["none placed", "one placed alone"])
def test_a_waiting_group_is_released_when_its_api_is_switched_off(gang, alone):
    world = waiting(scheduling={"gang": gang})
    world.gang_api = ""
    place(world, *alone)
    if gang == "Auto":
        assert world.told("GangUnavailable")
        assert world.wait(HOUR).status["restarts"]["released"] == 1, "as without a group"
    else:
        assert (world.phase, world.stalled, world.pods) == ("Pending", "GangUnavailable", {})
        world.wait(HOUR)
        world.gang_api = "v1alpha2"
        assert world.wait(HOUR).run().phase == "Running"
    assert world.counts == (0, 0, 0)


def test_a_group_is_not_lost_with_the_operator_that_made_it():
    world = waiting().restart_operator().wait(HOUR)
    assert (world.phase, world.status["attempt"]) == ("Starting", 1)
    place(world, 0, 1, 2)
    world.run()
    assert world.phase == "Running"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"nodeName": "n"}, "spec.template.spec.nodeName"),
        ({"schedulingGroup": {"podGroupName": "g"}}, "spec.template.spec.schedulingGroup"),
        ({"priorityClassName": "low"}, "spec.scheduling.priorityClassName"),
    ],
    ids=["nodeName", "schedulingGroup", "priorityClassName"],
)
def test_a_template_that_contradicts_scheduling_is_refused(fields, named):
    scheduling = {"gang": "Native", "priorityClassName": "high"}
    template = {"spec": {**TEMPLATE["spec"], **fields}}
    found = spec_.read(job_object(template=template, scheduling=scheduling)["spec"])
    assert named in found.flaw


# --- In trouble ---------------------------------------------------------------------------


def unfit(world: World, replica: int, message: str) -> World:
    conditions = [{"type": "PodScheduled", "status": "False", "message": message}]
    world.pods[f"job-{replica}"]["status"] = {"phase": "Pending", "conditions": conditions}
    return world.settle()


def test_a_standby_pod_that_is_preempted_is_replaced_alone():
    world = native(standby=1).settle().run()
    world.poll(holds=True).wait(2)
    world.run(3).wait(2).end(3, 143, settle=False)
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    world.pods["job-3"]["status"]["conditions"] = [taken]
    world.settle()
    assert (world.status["attempt"], world.status["membersSince"]) == (2, 1)
    assert groups_of(world) == {"", "job-uid-of-j-1"}


def test_a_group_that_is_gone_is_made_again_by_another_operator_too():
    world = waiting()
    name = world.status["podGroup"]
    world.groups.clear()
    world.restart_operator().wait(61)
    assert set(world.groups) == {name}


def test_a_silent_node_that_came_back_is_no_reason_to_wait_for_ever():
    """New pods are kept off it for its first minute, by a rule that they keep."""
    machines, snapshot = Machines(), {"path": "/snapshots", "volume": {"emptyDir": {}}}
    fence = {"policy": "Fence", "afterSeconds": 30}
    job = job_object(nodeLost=fence, snapshot=snapshot, restart={"replaceSeconds": 0})
    world = World(job, gang_api="v1beta1", machines=machines).settle().run()
    world.poll(holds=True).wait(2)
    machines.leases["node2"] = Lease(15.0, 10.0)
    uids = frozenset([world.pods["job-1"]["metadata"]["uid"]])
    world.feedback = replace(world.feedback, away=uids, away_at=world.now)
    world.settle()
    assert world.loss["reason"] == "NodeSilent"
    machines.leases.clear()
    for replica in range(3):
        unfit(world, replica, MISFIT)
    world.wait(HOUR).wait(HOUR)
    assert not any(pod["spec"].get("affinity") for pod in world.pods.values())
    assert world.counts == (1, 0, 1)


def test_a_refusal_while_a_group_waited_is_forgotten_once_it_has_nodes():
    world = waiting()
    world.refuse_network = lambda _: refusal(500, "etcd is away")
    world.wait(61)
    place(world, 0, 1, 2).run().wait(61)
    assert (world.phase, world.stalled) == ("Running", "")


def test_only_the_group_is_looked_for_while_it_waits():
    """A second write to a Service would be a war with whoever changed it."""
    world = waiting()
    world.now += timedelta(seconds=61)
    (action,) = world.plan().actions
    assert isinstance(action, act.EnsureNetwork)
    assert [body["kind"] for body in action.bodies] == ["PodGroup"]


def test_an_api_switched_off_before_the_first_pod_is_noticed():
    world = native()
    while world.job.get("status", {}).get("phase") != "Starting":
        world.carry_out(*world.plan().actions)
    world.gang_api = ""
    world.settle()
    assert groups_of(world) == {""}


def test_the_start_deadline_counts_from_the_last_pod_placed():
    world = waiting(startupDeadlineSeconds=100).wait(HOUR)
    place(world, 0).wait(99)
    place(world, 1, 2)
    at = {"type": "PodScheduled", "status": "True", "lastTransitionTime": world.now.isoformat()}
    for replica in (1, 2):
        world.pods[f"job-{replica}"]["status"]["conditions"] = [at]
    world.wait(99)
    assert (world.phase, world.counts) == ("Starting", (0, 0, 0))
    world.wait(2)
    assert world.counts == (1, 1, 0)


def test_in_1_37_too_it_says_who_does_not_fit():
    world = native().settle()
    unfit(unfit(unfit(world, 0, OTHERS_TOO), 2, OTHERS_TOO), 1, MISFIT).wait(6)
    assert MISFIT in world.condition("Stalled")["message"]


@pytest.mark.parametrize("first", [OTHERS, OTHERS_TOO, ""], ids=["1.36", "1.37", "none yet"])
def test_a_cause_that_shows_later_replaces_words_that_name_none(first):
    world = native().settle().wait(21)
    if first:
        unfit(world, 0, first)
    assert world.stalled == "Unschedulable"
    unfit(world, 0, OTHERS)
    unfit(world, 1, MISFIT)
    for _ in range(3):
        world.wait(61)
        assert MISFIT in world.condition("Stalled")["message"]
    assert len(world.told("Unschedulable")) == 2


def test_avoided_nodes_are_given_up_with_the_words_about_who_does_not_fit():
    world = native(startupDeadlineSeconds=100).settle().run().end(0, 74)
    unfit(unfit(world, 0, OTHERS), 1, MISFIT).wait(101)
    assert MISFIT in world.condition("Stalled")["message"]


def test_pods_that_have_just_got_their_nodes_are_not_called_stuck():
    world = waiting().wait(HOUR)
    place(world, 0, 1, 2)
    assert not world.told("ContainerCreating")
    assert world.plan().requeue_after is not None
    assert 0 < world.plan().requeue_after <= 20
    world.wait(21)
    assert world.told("ContainerCreating")


def test_a_group_that_cannot_be_removed_is_told_of():
    world = native().settle().run().end(1, 1, settle=False)
    for _ in range(30):
        for action in world.plan().actions:
            if not isinstance(action, act.RemoveGroups):  # each time an error
                world.carry_out(action)
        world.now += timedelta(seconds=2)
    assert (world.phase, world.stalled) == ("Restarting", "WaitingForDeletion")
    assert "job-uid-of-j-1" in world.condition("Stalled")["message"]
