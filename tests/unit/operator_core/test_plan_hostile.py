"""Stories in which users, webhooks, proxies and stale caches get in the way of the planner."""

import json
import sys
from copy import deepcopy
from datetime import timedelta

import pytest

from ddpjob_contract import crd
from ddpjob_contract.exits import DEAD_GANG_SECONDS
from ddpjob_operator.core import actions as act
from support.world import World, job_object, refusal, running, started
from unit.operator_core.test_classify import ended, init_failed


@pytest.mark.parametrize("reason", ["Bad Gateway", "Too Many Requests", "", "503", "Überlast"])
def test_a_refusal_whose_reason_is_no_word_does_not_spoil_the_status(reason):
    world = World()
    world.refuse_network = lambda _: refusal(502, reason=reason)
    assert world.settle().stalled == "CreationFailed"
    world.refuse_network = lambda _: None
    assert world.wait(3).run().phase == "Running"


@pytest.mark.parametrize(
    "state",
    [
        {"fileModifiedAt": "0999-12-31T23:59:59Z"},
        {"fileModifiedAt": "1000-01-01T00:00:00+14:00"},  # in UTC before 1000
        {"samplesPerSecond": sys.float_info.max},  # rounds up to infinity
        {"kind": "exit", "rank": 5 * 10**9, "round": 2**40, "signal": 2**31},
    ],
)
def test_nothing_that_a_trainer_tells_spoils_the_status(state):
    world = running().poll(**state).wait(60).end(1, 1, message=json.dumps({"version": 1, **state}))
    assert world.run().status["attempt"] == 2


@pytest.mark.fault("N11")
def test_a_pod_without_its_labels_that_keeps_the_name_is_deleted():
    world = running()
    uid = world.hide(1)
    world.settle().now += timedelta(seconds=2)
    while isinstance((todo := world.plan().actions)[0], act.WriteStatus):
        world.carry_out(todo[0])
    assert todo[0] == act.DeletePod("job-1", uid, DEAD_GANG_SECONDS)
    world.carry_out(*todo)
    assert world.settle().attempts() == {2}


@pytest.mark.fault("N11")
def test_a_number_that_somebody_wrote_on_a_pod_does_not_become_ours():
    world = running()
    labels = world.pods["job-1"]["metadata"]["labels"]
    labels[crd.LABEL_ATTEMPT] = "999999999"
    assert world.settle().run().status["attempt"] == 2
    assert world.attempts() == {2}


@pytest.mark.fault("A7")
def test_after_a_restore_of_etcd_no_attempt_comes_twice():
    world = running()
    old = {**world.job, "status": dict(world.status)}
    for _ in range(3):
        world.end(1, 1).wait(300).run()
    world.job = old
    assert world.settle().status["attempt"] == 5
    assert world.attempts() == {5}


def test_a_program_that_exits_0_because_it_is_deleted_has_not_succeeded():
    world = started(replicas=1).run().terminate(0).end(0, 0)
    assert world.phase != "Succeeded"
    assert world.loss["class"] == "Disruption"


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_nor_has_one_that_exits_0_because_its_kubelet_ends_the_pod(phase):
    """An eviction, or a node that shuts down: nobody deletes the pod, and its phase is Failed.

    One that was done before is Succeeded, whoever wants to disrupt it then.
    """
    world = started(replicas=1).run().end(0, 0, settle=False)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    world.pods["job-0"]["status"] |= {"phase": phase, "conditions": [condition]}
    if phase == "Succeeded":
        assert world.settle().phase == "Succeeded"
        return
    assert world.settle().status["attempt"] == 2
    assert (world.loss["class"], world.loss["reason"]) == ("Disruption", "TerminationByKubelet")
    assert world.counts == (1, 0, 1)


@pytest.mark.parametrize("reason", ["Error", "Evicted", "TerminationByKubelet"])
def test_rules_match_every_reason_that_kubernetes_gives(reason):
    world = started(restart={"rules": [{"reasons": [reason], "action": "Fail"}]}).run()
    world.end(0, 1, settle=False)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    world.pods["job-0"]["status"] |= {"reason": "Evicted", "conditions": [condition]}
    assert world.settle().phase == "Failed"
    assert world.loss["reason"] == "Evicted"


def test_a_pod_stuck_on_a_dead_node_is_reported_while_running():
    world = running().terminate(1)
    world.pods["job-1"]["metadata"]["deletionTimestamp"] = world.now.isoformat()
    assert world.wait(2).wait(3).plan().requeue_after == 15
    assert world.wait(16).stalled == "WaitingForDeletion"
    assert "out-of-service" in world.condition("Stalled")["message"]


@pytest.mark.fault("U7")
def test_a_pod_that_a_finalizer_holds_is_no_matter_of_its_node():
    world = running(graceful=True).end(1, 1).end(0, 143).end(2, 143).wait(60)
    assert (world.phase, world.status["attempt"]) == ("Restarting", 2)
    assert world.stalled == "WaitingForDeletion"
    assert "finalizers" in world.condition("Stalled")["message"]


@pytest.mark.fault("N11")
@pytest.mark.parametrize("name", ["job-0-debug", "debug-0"])
@pytest.mark.parametrize("phase", ["Pending", "Failed", "Succeeded"])
def test_a_copy_of_a_pod_is_no_replica_and_goes(name, phase):
    """With `kubectl get pod -o yaml`, another name and `kubectl apply`: labels and owner are ours.

    As a replica it hid the one whose number it carries, and the gang never ended.
    """
    world = running()
    copy = deepcopy(world.pods["job-0"])
    copy["metadata"] |= {"name": name, "uid": "copy"}
    world.pods[name] = {**copy, "status": {"phase": phase}}
    assert name not in world.settle().pods
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    assert world.end(0, 0).end(1, 0).end(2, 0).phase == "Succeeded"


@pytest.mark.fault("N16")
@pytest.mark.parametrize("reason", ["Error", "OOMKilled"])
def test_a_failed_init_container_is_told_and_meets_no_rule_of_the_trainers(reason):
    world = started(restart={"rules": [{"exitCodes": [3], "action": "Fail"}]})  # of the trainer
    failed = init_failed(3, reason, "no data set")["status"]
    failed["initContainerStatuses"].insert(0, {**ended(0), "name": "ok"})
    world.pods["job-0"]["status"] = failed
    failure = world.settle().status["lastFailure"]
    assert failure["message"] == "init container fetch: exit code 3\nno data set"
    names = {"Error": "InitContainerFailed", "OOMKilled": "OOMKilled"}
    assert (failure["reason"], failure["exitCode"]) == (names[reason], 3)
    assert world.status["restarts"]["charged"] == 1, "as a batch/v1 Job counts it"


@pytest.mark.fault("U3")
@pytest.mark.parametrize("phase", ["Starting", "Running", "Restarting", "Suspended"])
@pytest.mark.parametrize(
    "forged",
    [
        {"attempt": 2**31 - 1},
        {"attempt": 10**9 - 2},  # the next one fits no label that is believed
        {"attempt": -5},
        {"membersSince": 7},
        {"succeededReplicas": "0,5-6"},
        {"restarts": dict.fromkeys(("total", "disruptions", "consecutive"), 2**31 - 1)},
        {"timings": {"nextRestartAt": "2026-01-12T00:00:00Z"}},
    ],
)
def test_whatever_somebody_writes_into_the_status_the_job_gets_to_an_end(phase, forged):
    backoff = {"initialSeconds": 1, "maxSeconds": 1}
    restart = {"maxDisruptions": 2**31 - 1, "backoff": backoff}
    world = World(job_object(restart=restart)).settle().run()
    world.job["status"] |= {"phase": phase} | forged
    for lost in (True, False):
        for _ in range(3):
            world.settle(20)
            for name, pod in list(world.pods.items()):
                if name in world.pods and "containerStatuses" not in pod["status"]:
                    world.run(int(name[-1]))
            world.wait(60)
        assert world.phase == "Running"
        if lost:
            world.vanish(1)
    for name in list(world.pods):
        world.end(int(name[-1]), 0, settle=False)
    assert world.settle(20).phase == "Succeeded"


def test_an_invalid_attempt_number_is_replaced_first():
    """Until then a quorum read, which confirms an attempt by its number, would confirm nothing."""
    world = running()
    world.job["status"]["attempt"] = 2**31 - 1
    world.job["spec"]["suspend"] = True
    first = world.plan().actions[0]
    assert isinstance(first, act.WriteStatus)
    assert (first.status["attempt"], first.status["phase"]) == (0, "Running")
    assert world.settle(20).phase == "Suspended"


@pytest.mark.parametrize("phase", ["Running", "Suspended"])
def test_after_a_restore_of_etcd_no_condition_is_true_of_another_phase(phase):
    """The status is of an older attempt than the pods."""
    backoff = {"maxSeconds": 1}
    world = started(activeDeadlineSeconds=100, restart={"backoff": backoff}).run()
    if phase == "Suspended":
        world.patch(suspend=True).wait(90)
    old = world.job["status"]
    world.patch(suspend=False)
    for _ in range(2):
        world.run().end(0, 1).wait(20)
    world.job["status"] = old
    world.carry_out(world.plan().actions[0])
    assert (world.phase, world.status["attempt"]) == ("Restarting", max(world.attempts()) + 1)
    assert {c["type"] for c in world.status["conditions"] if c["status"] == "True"} == set()
    assert world.restart_operator().settle().run().phase == "Running", "no deadline has passed"


def test_a_status_field_dropped_by_an_older_crd_is_written_once():
    world = World()
    world.api.prunes = frozenset({"reason"})
    world.settle().run().end(0, 1)
    assert (world.phase, world.status["attempt"], len(world.pods)) == ("Starting", 2, 3)
    written = len(world.log)
    assert world.settle().log[written:] == []
    assert world.restart_operator().run().phase == "Running"
