"""Stories of a job in a queue of Kueue: no pod before admission, quota back after the last."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from support import workloads
from support.objects import leaving
from support.workloads import QUEUE, Kueue
from support.world import World, job_object, refusal

LATER = 10.0  # seconds after which a report may be written again


def queued(**spec: Any) -> World:
    """A job whose Workload is in the queue."""
    job = job_object(**spec)
    job["metadata"]["labels"] = {QUEUE: "team"}
    return World(job, kueue=Kueue(), graceful=True).settle()


def kueue_does(world: World, what: Callable[..., Any], *args: Any, **more: Any) -> World:
    """Kueue writes its Workload, and the operator looks."""
    assert world.kueue
    obj = world.kueue.only
    what(obj, world.now, *args, **more)
    world.kueue.touch(obj)
    return world.settle()


def admitted(**spec: Any) -> World:
    return kueue_does(queued(**spec), workloads.admit)


def running(**spec: Any) -> World:
    world = admitted(**spec).run()
    for past in (world.log, world.events):
        past.clear()
    return world


def workload(world: World) -> dict[str, Any]:
    assert world.kueue
    return world.kueue.only


def label(world: World, name: str, value: str | None) -> World:
    world.job["metadata"]["labels"] = {} if value is None else {name: value}
    return world.settle()


def test_a_queued_job_has_no_pods_and_a_workload_for_all_of_them():
    world = queued(standby=1)
    assert (world.phase, world.pods, world.stalled) == ("Pending", {}, "Queued")
    spec = workload(world)["spec"]
    assert spec["queueName"] == "team"
    assert [(one["name"], one["count"]) for one in spec["podSets"]] == [("trainer", 4)]
    template = world.job["spec"]["template"]["spec"]
    assert spec["podSets"][0]["template"]["spec"] == template
    (owner,) = workload(world)["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (world.job["metadata"]["uid"], True)


def test_kueues_words_are_told_and_replaced_by_newer_ones_with_one_event():
    world = kueue_does(queued(), workloads.pending, "couldn't assign flavors: 1 more needed").wait(
        LATER
    )
    assert world.condition("Stalled")["message"] == "couldn't assign flavors: 1 more needed"
    world = kueue_does(world, workloads.pending, "2 more needed").wait(LATER)
    assert world.condition("Stalled")["message"] == "2 more needed"
    assert len(world.told("Queued")) == 1


def test_nothing_is_charged_and_no_deadline_counts_while_it_waits():
    world = queued(startupDeadlineSeconds=60, activeDeadlineSeconds=60).wait(100_000)
    assert (world.phase, world.stalled) == ("Pending", "Queued")
    assert world.counts == (0, 0, 0)
    world = kueue_does(world, workloads.admit).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    assert world.stalled == ""
    assert world.wait(59).phase == "Running"
    kueue_does(world, workloads.evict).finish_deletions()
    assert world.wait(100_000).phase == "Pending"
    kueue_does(world, workloads.admit).run()
    assert world.wait(59).phase == "Running"
    assert world.wait(1).phase == "Failed"


def test_the_admission_is_a_start_with_the_flavours_labels_and_tolerations():
    world = queued()
    assert world.kueue
    spot = {"key": "spot", "operator": "Exists"}
    world.kueue.offer("a100", nodeLabels={"gpu": "a100"}, tolerations=[spot])
    world = kueue_does(world, workloads.admit, "default", "a100")
    assert len(world.pods) == 3
    for pod in world.pods.values():
        assert pod["spec"]["nodeSelector"] == {"gpu": "a100"}
        assert spot in pod["spec"]["tolerations"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "trainer"
        assert QUEUE not in pod["metadata"]["labels"]
    assert world.told("Admitted") != []


def test_the_queues_label_in_the_template_is_kept_off_the_pods():
    template = job_object()["spec"]["template"]
    labels = {QUEUE: "team", "mine": "1"}
    world = admitted(template={**template, "metadata": {"labels": labels}})
    for pod in world.pods.values():
        assert QUEUE not in pod["metadata"]["labels"]
        assert pod["metadata"]["labels"]["mine"] == "1"


def test_an_admission_check_changes_the_pod_template():
    update = {
        "name": "trainer",
        "labels": {"l": "1"},
        "annotations": {"a": "1"},
        "nodeSelector": {"n": "1"},
        "tolerations": [{"key": "t", "operator": "Exists"}],
    }
    world = queued()
    check = {"name": "prov", "state": "Pending", "message": "no nodes yet"}
    workload(world).setdefault("status", {})["admissionChecks"] = [check]
    world = kueue_does(world, workloads.reserve).wait(LATER)
    assert world.pods == {}
    assert "no nodes yet" in world.condition("Stalled")["message"]
    check |= {"state": "Ready", "podSetUpdates": [update]}
    world = kueue_does(world, workloads.admit)
    for pod in world.pods.values():
        assert pod["metadata"]["labels"]["l"] == pod["metadata"]["annotations"]["a"] == "1"
        assert pod["spec"]["nodeSelector"] == {"n": "1"}
        assert {"key": "t", "operator": "Exists"} in pod["spec"]["tolerations"]


def test_an_admission_that_contradicts_the_template_ends_the_workload():
    template = {"spec": {**job_object()["spec"]["template"]["spec"], "nodeSelector": {"zone": "a"}}}
    world = queued(template=template)
    assert world.kueue
    world.kueue.offer(nodeLabels={"zone": "b"})
    world = kueue_does(world, workloads.admit).wait(LATER)
    assert (world.pods, world.stalled) == ({}, "Queued")
    assert "zone is to be b, and is a" in world.condition("Stalled")["message"]
    assert workloads.condition(workload(world), "Finished")["reason"] == "FailedToStart"
    world.patch(suspend=True)
    assert world.kueue.objects == {}
    world.kueue.offer()
    kueue_does(world.patch(suspend=False), workloads.admit)
    assert len(world.pods) == 3


@pytest.mark.parametrize("at_once", [True, False])
def test_an_evicted_gang_releases_its_quota_after_the_last_pod(at_once):
    world = kueue_does(running(), workloads.evict, "Preempted" if at_once else "PodsReadyTimeout")
    assert (world.phase, world.stalled) == ("Pending", "Queued")
    assert {pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.pods.values()} == {30}
    assert workloads.true(workload(world), "QuotaReserved")
    del world.pods["job-0"]
    assert workloads.true(world.settle() and workload(world), "QuotaReserved")
    world.finish_deletions()
    given = workload(world)
    assert not workloads.true(given, "QuotaReserved")
    assert not workloads.true(given, "Admitted")
    assert "admission" not in given["status"]
    assert workloads.true(given, "Requeued") is at_once
    assert world.counts == (0, 0, 0)
    world = kueue_does(world, workloads.admit).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 2)


def test_quota_is_not_given_back_on_the_word_of_the_cache_alone():
    world = kueue_does(running(), workloads.evict)
    world.hide(0)
    job_0 = {"job-0": world.pods["job-0"]}
    world.pods.clear()  # a watch says so
    world.log.clear()
    todo = world.plan().actions
    assert [type(one) for one in todo] == [act.ConfirmGone]
    world.pods.update(job_0)
    world.settle()
    assert leaving(world.pods["job-0"])
    assert workloads.true(workload(world), "QuotaReserved")
    world.pods.clear()
    assert not workloads.true(workload(world.wait(20)), "QuotaReserved")


def test_a_gang_that_has_succeeded_as_it_was_evicted_has_succeeded():
    """No watch has shown that yet: a quorum is asked first."""
    world = running()
    assert world.kueue
    world.kueue.touch(workloads.evict(world.kueue.only, world.now))
    (first,) = world.plan().actions
    assert isinstance(first, act.ConfirmGone)
    world.all_end(0)
    assert world.settle().phase == "Succeeded"


def test_a_read_for_another_reason_is_not_taken_for_that_one():
    world = admitted(startupDeadlineSeconds=60)
    world.now += timedelta(seconds=61)
    world.carry_out(world.plan().actions[0])  # that no pod has a node
    (read,) = world.plan().actions
    assert read == act.ConfirmGone(1)
    world.carry_out(read)
    assert world.kueue
    world.kueue.touch(workloads.evict(world.kueue.only, world.now))
    assert world.plan().actions == (act.ConfirmGone(1, by_name=True),)


def test_a_failure_during_an_eviction_is_recorded_without_a_charge():
    world = running()
    world.end(0, 1, settle=False)
    world = kueue_does(world, workloads.evict)
    assert (world.phase, world.counts, world.loss["exitCode"]) == ("Pending", (0, 0, 0), 1)


def test_restarts_are_within_the_admitted_quota():
    world = running().end(0, 1)
    world.finish_deletions().run()
    assert (world.phase, world.status["attempt"], world.counts[1]) == ("Running", 2, 1)
    assert workloads.true(workload(world), "Admitted")


def test_kueue_hears_when_the_gang_runs_and_when_it_does_not():
    world = admitted()
    assert workloads.condition(workload(world), "PodsReady") == {}
    world.run()
    assert workloads.condition(workload(world), "PodsReady")["reason"] == "Started"
    world.end(0, 1)
    assert workloads.condition(workload(world), "PodsReady")["reason"] == "WaitForRecovery"
    world.finish_deletions().run()
    assert workloads.condition(workload(world), "PodsReady")["reason"] == "Recovered"
    kueue_does(world, workloads.evict).finish_deletions()
    assert workloads.condition(workload(world), "PodsReady")["reason"] == "WaitForStart"


@pytest.mark.parametrize(("code", "end"), [(0, "Succeeded"), (2, "Failed")])
def test_the_end_of_the_job_finishes_the_workload_after_the_last_pod(code, end):
    world = running()
    world.end(0, code).end(1, 0) if code else world.all_end(0).settle()
    assert world.phase == end
    assert workloads.true(workload(world), "Finished") is (end == "Succeeded")
    world.finish_deletions()
    assert workloads.condition(workload(world), "Finished")["reason"] == end
    assert world.restart_operator().settle().plan().actions == ()


def test_a_new_operator_finishes_the_workload_of_a_job_that_ended_long_ago():
    world = running()
    held = world.kueue
    world.kueue = None  # its API was away
    world.all_end(0).settle().wait(3600)
    world.kueue = held
    world.restart_operator().settle()
    assert workloads.condition(workload(world), "Finished")["reason"] == "Succeeded"


def test_suspend_leaves_the_queue_and_resume_joins_it_again():
    world = running().patch(suspend=True)
    assert world.kueue
    assert (world.phase, workloads.true(workload(world), "Admitted")) == ("Suspended", True)
    world.finish_deletions()
    assert world.kueue.objects == {}
    world.patch(suspend=False)
    assert (world.phase, world.pods, world.stalled) == ("Pending", {}, "Queued")
    assert world.condition("Suspended")["status"] == "False"
    kueue_does(world, workloads.admit).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 2)


def test_suspend_while_it_waits():
    world = queued().patch(suspend=True)
    assert world.kueue
    assert (world.phase, world.kueue.objects, world.stalled) == ("Suspended", {}, "")


def test_a_template_that_changed_while_suspended_asks_with_the_new_one():
    other = {"spec": {"containers": [{"name": "trainer", "image": "other"}]}}
    world = queued().patch(suspend=True).patch(template=other).patch(suspend=False)
    assert workload(world)["spec"]["podSets"][0]["template"]["spec"] == other["spec"]
    assert world.condition("Invalid").get("status") != "True"
    kueue_does(world, workloads.admit)
    assert world.pods["job-0"]["spec"]["containers"][0]["image"] == "other"


def test_a_template_that_changed_over_a_suspension_that_nobody_saw():
    other = {"spec": {"containers": [{"name": "trainer", "image": "other"}]}}
    world = running().edit(suspend=True, template=other).edit(suspend=False).settle()
    world.finish_deletions()
    assert workload(world)["spec"]["podSets"][0]["template"]["spec"] == other["spec"]
    assert not workloads.true(workload(world), "Admitted")


@pytest.mark.fault("U19")
def test_deactivation_ends_the_pods_and_says_how_to_go_on():
    world = kueue_does(running(), workloads.deactivate).finish_deletions()
    given = workload(world)
    assert not workloads.true(given, "QuotaReserved")
    assert not workloads.true(given, "Requeued")
    world.wait(LATER)
    assert "spec.active" in world.condition("Stalled")["message"]
    given["spec"]["active"] = True
    kueue_does(world, workloads.admit)
    assert len(world.pods) == 3


def test_without_kueue_the_job_waits_and_says_why():
    job = job_object()
    job["metadata"]["labels"] = {QUEUE: "team"}
    world = World(job).settle().wait(1000)
    assert (world.pods, world.stalled) == ({}, "QueueUnavailable")
    assert "install Kueue" in world.condition("Stalled")["message"]
    label(world, QUEUE, None)
    assert len(world.pods) == 3


@pytest.mark.fault("U20")
def test_without_kueues_api_a_gang_runs_on_and_gets_no_new_pods():
    world = running()
    held, world.kueue = world.kueue, None
    assert (world.settle().phase, len(world.pods)) == ("Running", 3)
    world.end(0, 1).finish_deletions().wait(60)
    assert (world.phase, world.pods, world.stalled) == ("Restarting", {}, "QueueUnavailable")
    world.kueue = held
    assert len(world.settle().pods) == 3


def test_a_new_operator_reads_the_flavours_before_it_makes_a_pod():
    world = queued()
    assert world.kueue
    world.kueue.offer(nodeLabels={"gpu": "a100"})
    kueue_does(world, workloads.admit).run()
    world.restart_operator().end(0, 1).finish_deletions()
    assert {pod["spec"]["nodeSelector"]["gpu"] for pod in world.pods.values()} == {"a100"}


def test_a_workload_that_somebody_deleted_ends_the_pods_and_is_made_again():
    world = running()
    assert world.kueue
    name, old = (workload(world)["metadata"][field] for field in ("name", "uid"))
    world.cluster.delete("workloads", name)
    world.settle()
    assert (world.phase, world.kueue.objects) == ("Pending", {})
    world.finish_deletions()
    assert workload(world)["metadata"]["uid"] != old


def test_a_label_that_changes_while_it_waits_is_followed():
    world = label(queued(), QUEUE, "other")
    assert workload(world)["spec"]["queueName"] == "other"
    world.job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "high"
    assert workload(world.settle())["spec"]["priorityClassRef"]["name"] == "high"


def test_a_label_that_changes_while_quota_is_reserved_asks_again_elsewhere():
    world = label(kueue_does(queued(), workloads.reserve), QUEUE, "other")
    assert workload(world)["spec"]["queueName"] == "other"
    assert not workloads.true(workload(world), "QuotaReserved")


def test_a_label_that_goes_while_it_waits_frees_the_job():
    world = label(queued(), QUEUE, None)
    assert world.kueue
    assert (world.kueue.objects, len(world.pods)) == ({}, 3)
    assert (world.told("Admitted"), len(world.told("Started"))) == ([], 1)


def test_another_snapshot_volume_releases_the_quota():
    """CEL overlooks one untyped field in place of another."""
    world = admitted(snapshot={"path": "/s", "volume": {"hostPath": {"path": "/a"}}})
    kueue_does(world, workloads.evict).finish_deletions()
    world.patch(snapshot={"path": "/s", "volume": {"hostPath": {"type": ""}}})
    assert world.kueue
    assert (world.kueue.objects, world.status["reason"]) == ({}, "SnapshotChanged")


@pytest.mark.parametrize("value", [None, "other"])
def test_a_label_that_changes_while_it_runs_counts_once_the_quota_is_free(value):
    world = label(running(), QUEUE, value)
    assert (world.phase, len(world.pods)) == ("Running", 3)
    assert workload(world)["spec"]["queueName"] == "team"
    kueue_does(world, workloads.evict).finish_deletions()
    assert world.kueue
    if value is None:
        assert (world.kueue.objects, len(world.pods)) == ({}, 3)
    else:
        assert workload(world)["spec"]["queueName"] == "other"


def test_a_label_that_comes_while_it_runs_ends_the_pods_and_queues_the_job():
    world = World(job_object(), kueue=Kueue(), graceful=True).settle().run()
    label(world, QUEUE, "team")
    assert world.kueue
    assert (world.phase, world.stalled, world.kueue.objects) == ("Pending", "Queued", {})
    world.finish_deletions()
    assert workload(world)["spec"]["queueName"] == "team"


def test_finished_replicas_release_quota_and_a_restart_requests_all():
    world = running().end(0, 0)
    assert "reclaimablePods" not in workload(world)["status"]
    world.wait(700)
    assert workload(world)["status"]["reclaimablePods"] == [{"name": "trainer", "count": 1}]
    world.end(1, 1)
    assert (world.phase, world.stalled) == ("Pending", "Queued")
    world.finish_deletions()
    given = workload(world)
    assert not workloads.true(given, "QuotaReserved")
    assert "reclaimablePods" not in given["status"]
    kueue_does(world, workloads.admit).run()
    assert world.phase == "Running"


def test_pods_that_kueue_wants_to_place_by_topology_are_not_made():
    racks = {"levels": ["rack"]}
    world = kueue_does(queued(), workloads.admit, topologyAssignment=racks).wait(LATER)
    assert (world.pods, world.stalled) == ({}, "Queued")
    assert "topology" in world.condition("Stalled")["message"]


def test_a_refused_workload_is_reported_and_retried_with_growing_delays():
    job = job_object()
    job["metadata"]["labels"] = {QUEUE: "team"}
    world = World(job, kueue=Kueue())
    assert world.kueue
    invalid = refusal(422, "spec.podSets[0]: Invalid")
    world.wire.gate = lambda call: invalid if call.plural == "workloads" else ""
    world.settle().wait(LATER)
    said = world.condition("Stalled")["message"]
    assert "Invalid" in said
    assert "has not looked" not in said
    for _ in range(10):
        world.wait(60)
    assert world.tries("workloads") < 10
    world.wire.gate = lambda _: ""
    world.wait(400)
    assert workload(world)["spec"]["queueName"] == "team"


def test_a_spec_that_no_pod_can_be_made_of_asks_for_no_quota():
    job = job_object(nprocPerNode="many")
    job["metadata"]["labels"] = {QUEUE: "team"}
    world = World(job, kueue=Kueue()).settle()
    assert world.kueue
    assert (world.kueue.objects, world.status["reason"]) == ({}, "SpecInvalid")


def test_a_restart_of_the_operator_while_it_waits_changes_nothing():
    world = queued().wait(LATER)
    before = world.job["status"]
    assert world.restart_operator().settle().job["status"] == before


def test_a_job_without_the_label_never_meets_kueue():
    world = World(job_object(), kueue=Kueue()).settle().run()
    assert world.kueue
    assert (world.phase, world.kueue.objects) == ("Running", {})
    assert "kueue.x-k8s.io/podset" not in world.pods["job-0"]["metadata"]["labels"]


def test_an_eviction_during_a_restart_sets_wait_for_start():
    """Kueue counts WaitForRecovery from when that was told, however long the job was in a queue."""
    world = running().end(0, 1)
    assert workloads.condition(workload(world), "PodsReady")["reason"] == "WaitForRecovery"
    kueue_does(world, workloads.evict, "PodsReadyTimeout").finish_deletions()
    assert workloads.condition(workload(world), "PodsReady")["reason"] == "WaitForStart"


def test_a_refused_priority_is_told_until_its_label_goes():
    world = queued()
    world.job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "typo"
    assert "typo not found" in world.settle().wait(LATER).condition("Stalled")["message"]
    label(world, QUEUE, "team").wait(400)
    assert "typo not found" not in world.condition("Stalled")["message"]


def test_a_job_that_kueue_wants_to_place_by_topology_gives_its_quota_back():
    """Else the advice, another queue, could not be taken: the label counts once quota is free."""
    world = kueue_does(queued(), workloads.admit, topologyAssignment={"levels": ["rack"]})
    assert workloads.condition(workload(world), "Finished")["reason"] == "FailedToStart"
    label(world, QUEUE, "other").patch(suspend=True).patch(suspend=False)
    assert workload(world)["spec"]["queueName"] == "other"


def test_an_evicted_pod_that_does_not_end_is_named_as_it_keeps_the_quota():
    world = kueue_does(running(), workloads.evict)
    world.pods = {"job-0": world.pods["job-0"]}
    world.settle().wait(3600).wait(LATER)
    assert world.stalled == "WaitingForDeletion"
    assert "pod job-0 has not ended" in world.condition("Stalled")["message"]
    world.finish_deletions().wait(LATER)
    assert world.stalled == "Queued"


def test_the_share_of_a_replica_whose_sidecar_runs_stays_in_use():
    sidecar = {"name": "sidecar", "image": "sidecar"}
    trainer = job_object()["spec"]["template"]["spec"]["containers"]
    world = running(template={"spec": {"containers": [*trainer, sidecar]}}).end(0, 0)
    status = world.pods["job-0"]["status"]
    status["phase"] = "Running"
    status["containerStatuses"].append({"name": "sidecar", "state": {"running": {}}})
    world.wait(700)
    assert "reclaimablePods" not in workload(world)["status"]
    status["containerStatuses"].pop()
    status["phase"] = "Succeeded"
    assert workload(world.settle())["status"]["reclaimablePods"][0]["count"] == 1


def test_a_workload_that_is_going_is_not_deleted_again_and_again():
    world = label(running(), QUEUE, None)
    left = workloads.pending(workload(world), world.now)
    left["metadata"]["deletionTimestamp"] = workloads.stamp(world.now)  # a finalizer keeps it
    assert world.plan().actions == ()


def test_an_admission_of_fewer_pods_than_it_asked_for_is_given_up():
    """Somebody has edited its Workload."""
    world = kueue_does(queued(), workloads.admit, count=2)
    assert (world.pods, workload(world).get("status")) == ({}, None)


def test_a_restart_waits_for_kueues_api_without_a_deadline_and_one_event():
    world = running(startupDeadlineSeconds=60)
    held, world.kueue = world.kueue, None
    world.end(0, 1).finish_deletions()
    for _ in range(60):
        world.wait(60)
    assert (world.phase, world.status["attempt"]) == ("Restarting", 2)
    assert (world.stalled, len(world.told("QueueUnavailable"))) == ("QueueUnavailable", 1)
    world.kueue = held
    assert len(world.settle().pods) == 3


def test_a_restart_that_the_template_contradicts_waits_without_a_deadline():
    """An administrator has changed the flavour since."""
    template = {"spec": {**job_object()["spec"]["template"]["spec"], "nodeSelector": {"zone": "a"}}}
    world = running(startupDeadlineSeconds=60, template=template)
    assert world.kueue
    world.kueue.offer(nodeLabels={"zone": "b"})
    world.restart_operator().end(0, 1).finish_deletions()
    for _ in range(60):
        world.wait(60)
    assert (world.stalled, len(world.told("Queued"))) == ("Queued", 2)
    assert "suspend the job" in world.condition("Stalled")["message"]
    world.patch(suspend=True)
    assert world.kueue.objects == {}


def test_an_admitted_job_that_does_not_start_yet_says_what_it_waits_for():
    """Its flavours cannot be read: the right is missing, or one was removed."""
    world = running().patch(suspend=True)
    world.restart_operator().patch(suspend=False).wait(LATER)
    assert "are read: default" in world.condition("Stalled")["message"]


def test_an_eviction_is_not_called_a_suspension_by_the_user():
    world = running()
    world.status["avoidedNodes"] = ["node1"]
    kueue_does(world, workloads.evict).finish_deletions()
    kueue_does(world, workloads.admit)
    (told,) = world.told("NodesTriedAgain")
    assert "the job was admitted" in told
