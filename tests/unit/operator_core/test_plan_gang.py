"""Stories of gangs that Kubernetes places as one PodGroup: whole or not at all."""

from dataclasses import replace
from datetime import timedelta

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
NAMES = ["job-uid-of-j-1", "job-uid-of-j-2"]  # of the groups of attempts 1 and 2
NATIVE = {"gang": "Native"}


def native(*, api="v1beta1", **spec):
    return World(job_object(**spec), gang_api=api)


def running(**spec):
    """A gang that holds."""
    return native(**spec).settle().run().poll(holds=True).wait(2)


def conditioned(world, replica, **condition):
    world.pods[f"job-{replica}"]["status"]["conditions"] = [condition]


def unfit(world, message, *replicas):
    """The scheduler says so of these pods."""
    for replica in replicas or range(3):
        world.pods[f"job-{replica}"]["status"] = {"phase": "Pending"}
        conditioned(world, replica, type="PodScheduled", status="False", message=message)
    return world.settle()


def waiting(**spec):
    """All pods are there and one of them fits nowhere, so that none has a node."""
    return unfit(unfit(native(**spec).settle(), OTHERS), MISFIT, 1).wait(6)


def place(world, *replicas):
    for replica in replicas:
        world.pods[f"job-{replica}"]["spec"]["nodeName"] = "node1"
        world.pods[f"job-{replica}"]["status"] = {"phase": "Pending"}
    return world.settle()


def taken(world, *replicas):
    """The scheduler has preempted these pods."""
    for replica in replicas:
        told = {"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}
        conditioned(world, replica, status="True", **told)
    return world


def api(world, version):
    """What serves PodGroups from now on."""
    world.gang_api = version
    return world.settle()


def gone(world):
    """A stranger removes the groups."""
    for name in world.groups:
        del world.cluster.objects["podgroups", "ns", name]
    return grouped(world)


def named(world, *names):
    """Check which groups the pods name; "" for pods without one."""
    found = (pod["spec"].get("schedulingGroup") or {} for pod in world.pods.values())
    assert {group.get("podGroupName", "") for group in found} == set(names)
    return world


def grouped(world, *names):
    """Check which groups there are."""
    assert set(world.groups) == set(names)
    return world


@pytest.mark.parametrize(
    ("api", "whole"), [("v1beta1", {"all": {}}), ("v1alpha2", "PodGroup")], ids=str
)
def test_the_group_comes_before_the_first_pod_and_all_pods_name_it(api, whole):
    scheduling = {"topologyKey": "rack", "priorityClassName": "high"}
    world = named(native(api=api, scheduling=scheduling).settle(), NAMES[0]).sees(podGroup=NAMES[0])
    assert world.log.index(f"create group {NAMES[0]}") < world.log.index("create job-0 1")
    body = world.groups[NAMES[0]]
    assert body["apiVersion"] == f"scheduling.k8s.io/{api}"
    assert body["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 3}},
        "disruptionMode": whole,
        "priorityClassName": "high",
        "schedulingConstraints": {"topology": [{"key": "rack"}]},
    }
    assert {pod["spec"]["priorityClassName"] for pod in world.pods.values()} == {"high"}


WITHOUT = {
    "none": {"scheduling": {"gang": "None"}},
    "one pod": {"replicas": 1},
    "another scheduler": {"template": {"spec": {**TEMPLATE["spec"], "schedulerName": "volcano"}}},
    "a node by name": {"template": {"spec": {**TEMPLATE["spec"], "nodeName": "node1"}}},
}


@pytest.mark.parametrize("spec", WITHOUT.values(), ids=WITHOUT)
def test_auto_leaves_the_group_out_where_it_does_nothing(spec):
    grouped(named(native(**spec).settle(), "")).sees(podGroup=None)


@pytest.mark.parametrize("scheduling", [NATIVE, {"topologyKey": "rack"}], ids=str)
def test_gang_native_waits_for_the_api_without_a_charge(scheduling):
    world = native(api="", scheduling=scheduling).settle().wait(HOUR)
    told = {"phase": "Pending", "stalled": "GangUnavailable", "made": 0, "counts": (0, 0, 0)}
    world.sees("apply it again with gang None", **told)
    api(world, "v1alpha2").run().sees(phase="Running", stalled="")


def test_a_waiting_group_is_never_given_back_and_says_who_does_not_fit():
    world = waiting().sees(MISFIT, "job-1", phase="Starting", stalled="Unschedulable")
    for _ in range(24):
        world.wait(HOUR)
    world.sees(phase="Starting", attempt=1, counts=(0, 0, 0)).tells("Unschedulable", MISFIT)


def suspended(world):
    return world.patch(suspend=True)


def succeeded(world):
    return world.all_end(0).settle()


@pytest.mark.parametrize("end", [suspended, succeeded, lambda world: world.end(1, 1)])
def test_the_group_goes_with_its_attempt(end):
    world = grouped(end(native(restart={"maxRestarts": 0}).settle().run())).sees(podGroup=None)
    assert world.log.count("remove groups") == 1
    world.restart_operator().wait(HOUR)
    assert world.log.count("remove groups") == 1, "the status tells that it is done"
    if end is suspended:
        named(world.patch(suspend=False), NAMES[1])


def test_the_group_goes_before_a_job_whose_time_to_live_is_over():
    world = native(ttlSecondsAfterFinished=0).settle().run().end(0, 0).end(1, 0)
    world.end(2, 0, settle=False)
    while "delete job" not in world.log:
        world.carry_out(*world.plan().actions)
    assert world.log.index("remove groups") < world.log.index("delete job")


def test_a_restart_takes_a_new_group_and_removes_the_old_one():
    world = native().settle().run().end(1, 1).sees(attempt=2)
    log = named(grouped(world, NAMES[1]), NAMES[1]).log
    assert log.index("remove groups") < log.index(f"create group {NAMES[1]}")


STORIES = {
    "auto uses a group from the first attempt with the api": lambda: (
        named(api(named(native(api="").settle().run(), ""), "v1beta1").end(1, 1).sees(attempt=2),
              NAMES[1])),
    "a replaced pod joins the group of the others": lambda: (
        grouped(named(running().vanish(1).sees(intent=(2, 1, "1:2")), NAMES[0]), NAMES[0])
        .run().sees(phase="Running", podGroup=NAMES[0])),
    "the deadline of the start counts from the placement": lambda: (
        place(waiting(startupDeadlineSeconds=100).wait(HOUR), 0, 1, 2).wait(99)
        .sees(phase="Starting").wait(2).sees(why="StartupDeadlineExceeded", counts=(1, 1, 0))),
    "and from that of the last one": lambda: (
        place(place(waiting(startupDeadlineSeconds=100).wait(HOUR), 0).wait(99), 1, 2)
        .do(bound_now).wait(99).sees(phase="Starting", counts=(0, 0, 0))
        .wait(2).sees(counts=(1, 1, 0))),
    "pods placed one by one are released as without a group": lambda: (
        place(waiting(startupDeadlineSeconds=100).wait(HOUR), 0).wait(99).sees(phase="Starting")
        .wait(2).sees(phase="Pending", stalled="Unschedulable", counts=(0, 0, 0))),
    "a preempted group leaves the room to those it was taken for": lambda: (
        named(taken(running(), 0, 1, 2).end(0, 143)
              .sees(intent=(2, 2, ""), pause=15.0, counts=(1, 0, 1), made=0).wait(16), NAMES[1])),
    # Before anybody has seen its condition.
    "and so it does where its first pod is gone": lambda: (
        named(taken(running(), 0, 1, 2).vanish(0)
              .sees(intent=(2, 2, ""), pause=15.0, counts=(1, 0, 1), made=0).wait(16), NAMES[1])),
    # A preempting pod is not bound yet, and of a preempting gang only some are.
    "preempted pods without a group leave it for as long": lambda: (
        taken(World(job_object(scheduling={"gang": "None"})).settle().run(), 1).vanish(0)
        .sees(pause=15.0, attempt=2, membersSince=2)),
    "and one of a gang that holds": lambda: (
        taken(running(scheduling={"gang": "None"}), 1).vanish(0)
        .sees(pause=15.0, attempt=2, membersSince=1)),
    "native retries a refused group with a reason": lambda: (
        refusing("podgroups is forbidden", scheduling=NATIVE)
        .sees("podgroups is forbidden", phase="Pending", stalled="GangUnavailable", made=0)
        .do(lambda w: setattr(w, "no_gang", "")).wait(HOUR).run()
        .sees(phase="Running", counts=(0, 0, 0))),
    "without room elsewhere it uses avoided nodes again": lambda: (
        unfit(native(startupDeadlineSeconds=100).settle().run().end(0, 74)
              .sees(avoidedNodes=["node1"]), MISFIT).wait(101)
        .sees(phase="Pending", avoidedNodes=None)),
    "and says who does not fit": lambda: (
        unfit(unfit(native(startupDeadlineSeconds=100).settle().run().end(0, 74), OTHERS, 0),
              MISFIT, 1).wait(101).sees(MISFIT)),
    "a group that a stranger removed while it waited is made again": lambda: (
        grouped(gone(waiting()).wait(61).wait(61), NAMES[0])),
    "by another process, too": lambda: (
        grouped(gone(waiting()).restart_operator().wait(61), NAMES[0])),
    "it is not lost with the operator that made it": lambda: (
        place(waiting().restart_operator().wait(HOUR).sees(phase="Starting", attempt=1), 0, 1, 2)
        .run().sees(phase="Running")),
    # By a rule that they keep new pods are kept off it for its first minute.
    "a silent node that came back is no reason to wait for ever": lambda: (
        unfit(came_back(), MISFIT).wait(HOUR).wait(HOUR).sees(counts=(1, 0, 1))
        .do(lambda w: check(not any(pod["spec"].get("affinity") for pod in w.pods.values())))),
    "a refusal while it waited is forgotten once it has nodes": lambda: (
        place(waiting().do(lambda w: setattr(w, "refuse_network", lambda _: refusal(500, "etcd")))
              .wait(61), 0, 1, 2).run().wait(61).sees(phase="Running", stalled="")),
    "in 1.37 too it says who does not fit": lambda: (
        unfit(unfit(native().settle(), OTHERS_TOO, 0, 2), MISFIT, 1).wait(6).sees(MISFIT)),
}  # fmt: skip


def check(fact):
    assert fact


def bound_now(world):
    """As the API server says of pods 1 and 2."""
    at = world.now.isoformat()
    for replica in (1, 2):
        conditioned(world, replica, type="PodScheduled", status="True", lastTransitionTime=at)


def refusing(why, **spec):
    """No group can be had."""
    world = native(**spec)
    world.no_gang = why
    return world.settle()


def came_back():
    """Fence has given node2 up, whose Lease is new again."""
    machines, snapshot = Machines(), {"path": "/snapshots", "volume": {"emptyDir": {}}}
    fence = {"policy": "Fence", "afterSeconds": 30}
    job = job_object(nodeLost=fence, snapshot=snapshot, restart={"replaceSeconds": 0})
    world = World(job, gang_api="v1beta1", machines=machines).settle().run()
    world.poll(holds=True).wait(2)
    machines.leases["node2"] = Lease(15.0, 10.0)
    uids = frozenset([world.pods["job-1"]["metadata"]["uid"]])
    world.feedback = replace(world.feedback, away=uids, away_at=world.now)
    assert world.settle().loss["reason"] == "NodeSilent"
    machines.leases.clear()
    return world


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_gang_and_its_group(story):
    story()


def test_pods_that_stand_by_belong_to_no_group():
    world = running(standby=1, scheduling={"priorityClassName": "high"})
    assert "schedulingGroup" not in world.pods["job-3"]["spec"]
    assert world.groups[NAMES[0]]["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3
    world.run(3).wait(2).end(3, 143, settle=False)  # preempted, it is replaced alone
    named(taken(world, 3).settle().sees(attempt=2, membersSince=1), "", NAMES[0])


@pytest.mark.parametrize("when", ["group", "pod"])
def test_auto_goes_on_without_a_group_that_cannot_be_had_whole(when):
    why = "the API server drops spec.disruptionMode"

    def dropped(_):
        """As the executor learns it from the answer to the first pod's creation."""
        world.feedback = replace(world.feedback, no_gang=(world.status["attempt"], why))

    world = native()
    if when == "group":
        world.no_gang = why
    else:
        world.refuse = dropped
    grouped(world.settle()).sees(podGroup=None).tells("GangUnavailable", why)
    world.run().sees(phase="Running", counts=(0, 0, 0))


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
        world.sees(phase="Pending", stalled="GangUnavailable", made=0).wait(HOUR)
        world.gang_api = "v1alpha2"
        world.wait(HOUR).run().sees(phase="Running")
    world.sees(counts=(0, 0, 0))


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
    scheduling = {**NATIVE, "priorityClassName": "high"}
    template = {"spec": {**TEMPLATE["spec"], **fields}}
    assert named in spec_.read(job_object(template=template, scheduling=scheduling)["spec"]).flaw


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
    named(api(world, ""), "")


@pytest.mark.parametrize("first", [OTHERS, OTHERS_TOO, ""], ids=["1.36", "1.37", "none yet"])
def test_a_cause_that_shows_later_replaces_words_that_name_none(first):
    world = native().settle().wait(21)
    if first:
        unfit(world, first, 0)
    unfit(unfit(world.sees(stalled="Unschedulable"), OTHERS, 0), MISFIT, 1)
    for _ in range(3):
        world.wait(61).sees(MISFIT)
    world.tells("Unschedulable", times=2)


def test_pods_that_have_just_got_their_nodes_are_not_called_stuck():
    world = place(waiting().wait(HOUR), 0, 1, 2).tells("ContainerCreating", times=0)
    assert 0 < world.plan().requeue_after <= 20
    assert world.wait(21).told("ContainerCreating")


def test_a_group_that_cannot_be_removed_is_told_of():
    world = native().settle().run().end(1, 1, settle=False)
    for _ in range(30):
        for action in world.plan().actions:
            if not isinstance(action, act.RemoveGroups):  # each time an error
                world.carry_out(action)
        world.now += timedelta(seconds=2)
    world.sees(NAMES[0], phase="Restarting", stalled="WaitingForDeletion")
