"""Stories of a job in a queue of Kueue: no pod before admission, quota back after the last."""

from datetime import timedelta

import pytest

from ddpjob_operator.core import actions as act
from support import workloads
from support.workloads import QUEUE, Kueue, admit, evict, pending, reserve
from support.world import World, job_object, refusal

LATER = 10.0  # seconds after which a report may be written again
RACKS = {"topologyAssignment": {"levels": ["rack"]}}
POD = job_object()["spec"]["template"]["spec"]
IN_A = {"spec": {**POD, "nodeSelector": {"zone": "a"}}}
OTHER = {"spec": {"containers": [{"name": "trainer", "image": "other"}]}}


def labelled(*, kueue=True, **spec):
    job = job_object(**spec)
    job["metadata"]["labels"] = {QUEUE: "team"}
    return World(job, kueue=Kueue() if kueue else None, graceful=kueue)


def queued(**spec):
    """A job whose Workload is in the queue."""
    return labelled(**spec).settle()


def admitted(**spec):
    return queued(**spec).kueue_does(admit)


def running(**spec):
    world = admitted(**spec).run()
    for past in (world.log, world.events):
        past.clear()
    return world


def evicted(world, *why):
    return world.kueue_does(evict, *why).finish_deletions()


def hours(world):
    for _ in range(60):
        world.wait(60)
    return world


def kueue(world, api):
    """Kueue's API is away, or back."""
    world.kueue = api
    return world.settle()


def offered(world, name="default", **spec):
    world.kueue.offer(name, **spec)
    return world


# --- Waiting ------------------------------------------------------------------------------------


def test_a_queued_job_has_no_pods_and_a_workload_for_all_of_them():
    world = queued(standby=1).sees(phase="Pending", made=0, stalled="Queued", queue="team")
    (pod_set,) = world.workload["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"]) == ("trainer", 4)
    assert pod_set["template"]["spec"] == world.job["spec"]["template"]["spec"]
    (owner,) = world.workload["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (world.job["metadata"]["uid"], True)


WAITING = {
    "kueue's words are told and replaced by newer ones with one event": lambda: (
        queued().kueue_does(pending, "1 more needed").wait(LATER).sees("1 more needed")
        .kueue_does(pending, "2 more needed").wait(LATER).sees("2 more needed").tells("Queued")),
    "nothing is charged and no deadline counts": lambda: (
        evicted(queued(startupDeadlineSeconds=60, activeDeadlineSeconds=60).wait(100_000)
                .sees(phase="Pending", stalled="Queued", counts=(0, 0, 0))
                .kueue_does(admit).run().sees(phase="Running", attempt=1, stalled="")
                .wait(59).sees(phase="Running"))
        .wait(100_000).sees(phase="Pending")
        .kueue_does(admit).run().wait(59).sees(phase="Running").wait(1).sees(phase="Failed")),
    "without kueue it says why": lambda: (
        labelled(kueue=False).settle().wait(1000)
        .sees("install Kueue", made=0, stalled="QueueUnavailable").label().sees(made=3)),
    "suspended": lambda: (
        queued().patch(suspend=True).sees(phase="Suspended", workloads=0, stalled="")),
    "a template that changed while suspended": lambda: (
        queued().patch(suspend=True).patch(template=OTHER).patch(suspend=False)
        .do(lambda w: check_asked(w, OTHER)).kueue_does(admit).do(check_other_image)),
    "another queue, another priority": lambda: (
        queued().label(queue="other").sees(queue="other")
        .label(queue="other", priority="high").do(lambda w: check_priority(w, "high"))),
    "another queue while quota is reserved": lambda: (
        queued().kueue_does(reserve).label(queue="other").sees(queue="other", quota=False)),
    "no queue any more": lambda: (
        queued().label().sees(workloads=0, made=3).tells("Started").tells("Admitted", times=0)),
    "a priority class that is not there": lambda: (
        queued().label(queue="team", priority="typo").wait(LATER).sees("typo not found")
        .label(queue="team").wait(400).do(lambda w: check_unsaid(w, "typo not found"))),
    "a spec that no pod can be made of": lambda: (
        queued(nprocPerNode="many").sees(workloads=0, reason="SpecInvalid")),
    "a place by topology is not taken": lambda: (
        queued().kueue_does(admit, **RACKS).wait(LATER)
        .sees("topology", made=0, stalled="Queued", finished="FailedToStart")
        .label(queue="other").patch(suspend=True).patch(suspend=False).sees(queue="other")),
    "fewer pods than it asked for, by an edit of its Workload": lambda: (
        queued().kueue_does(admit, count=2).sees(made=0).do(check_given_up)),
    "flavours that cannot be read": lambda: (
        running().patch(suspend=True).restart_operator().patch(suspend=False).wait(LATER)
        .sees("have ended: default")),
}  # fmt: skip


@pytest.mark.parametrize("story", WAITING.values(), ids=WAITING)
def test_while_it_waits(story):
    story()


def check_asked(world, template):
    assert world.workload["spec"]["podSets"][0]["template"]["spec"] == template["spec"]
    assert world.condition("Invalid").get("status") != "True"


def check_other_image(world):
    assert world.pods["job-0"]["spec"]["containers"][0]["image"] == "other"


def check_priority(world, name):
    assert world.workload["spec"]["priorityClassRef"]["name"] == name


def check_unsaid(world, words):
    assert words not in world.condition("Stalled")["message"]


def check_given_up(world):
    assert world.workload.get("status") is None


def test_a_restart_of_the_operator_while_it_waits_changes_nothing():
    world = queued().wait(LATER)
    before = world.job["status"]
    assert world.restart_operator().settle().job["status"] == before


def test_a_refused_workload_is_reported_and_retried_with_growing_delays():
    world, invalid = labelled(), refusal(422, "spec.podSets[0]: Invalid")
    world.wire.gate = lambda call: invalid if call.plural == "workloads" else ""
    world.settle().wait(LATER).sees("Invalid").do(lambda w: check_unsaid(w, "has not looked"))
    for _ in range(10):
        world.wait(60)
    assert world.tries("workloads") < 10
    world.wire.gate = lambda _: ""
    world.wait(400).sees(queue="team")


def test_a_job_without_the_label_never_meets_kueue():
    world = World(job_object(), kueue=Kueue()).settle().run().sees(phase="Running", workloads=0)
    assert "kueue.x-k8s.io/podset" not in world.pods["job-0"]["metadata"]["labels"]


# --- Admission ----------------------------------------------------------------------------------


def test_the_admission_is_a_start_with_the_flavours_labels_and_tolerations():
    spot = {"key": "spot", "operator": "Exists"}
    world = offered(queued(), "a100", nodeLabels={"gpu": "a100"}, tolerations=[spot])
    world.kueue_does(admit, "default", "a100").sees(made=3).tells("Admitted")
    for pod in world.pods.values():
        assert pod["spec"]["nodeSelector"] == {"gpu": "a100"}
        assert spot in pod["spec"]["tolerations"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "trainer"
        assert QUEUE not in pod["metadata"]["labels"]
    # A new operator reads the flavours before it makes a pod.
    world.run().restart_operator().end(0, 1).finish_deletions()
    assert {pod["spec"]["nodeSelector"]["gpu"] for pod in world.pods.values()} == {"a100"}


def test_the_queues_label_in_the_template_is_kept_off_the_pods():
    template = {"spec": POD, "metadata": {"labels": {QUEUE: "team", "mine": "1"}}}
    for pod in admitted(template=template).pods.values():
        assert QUEUE not in pod["metadata"]["labels"]
        assert pod["metadata"]["labels"]["mine"] == "1"


def test_an_admission_check_changes_the_pod_template():
    more = {"key": "t", "operator": "Exists"}
    update = {"name": "trainer", "labels": {"l": "1"}, "annotations": {"a": "1"},
              "nodeSelector": {"n": "1"}, "tolerations": [more]}  # fmt: skip
    world = queued()
    check = {"name": "prov", "state": "Pending", "message": "no nodes yet"}
    world.workload.setdefault("status", {})["admissionChecks"] = [check]
    world.kueue_does(reserve).wait(LATER).sees("no nodes yet", made=0)
    check |= {"state": "Ready", "podSetUpdates": [update]}
    for pod in world.kueue_does(admit).pods.values():
        assert pod["metadata"]["labels"]["l"] == pod["metadata"]["annotations"]["a"] == "1"
        assert pod["spec"]["nodeSelector"] == {"n": "1"}
        assert more in pod["spec"]["tolerations"]


def test_an_admission_that_contradicts_the_template_ends_the_workload():
    world = offered(queued(template=IN_A), nodeLabels={"zone": "b"}).kueue_does(admit).wait(LATER)
    world.sees("zone is to be b, and is a", made=0, stalled="Queued", finished="FailedToStart")
    offered(world.patch(suspend=True).sees(workloads=0)).patch(suspend=False).kueue_does(admit)
    world.sees(made=3)


def test_kueue_hears_when_the_gang_runs_and_when_it_does_not():
    world = admitted().sees(ready_word=None).run().sees(ready_word="Started")
    world.end(0, 1).sees(ready_word="WaitForRecovery")
    evicted(world.finish_deletions().run().sees(ready_word="Recovered"))
    world.sees(ready_word="WaitForStart")
    # It counts WaitForRecovery from when that was told, however long the job was in a queue.
    world = running().end(0, 1).sees(ready_word="WaitForRecovery")
    evicted(world, "PodsReadyTimeout").sees(ready_word="WaitForStart")


# --- Eviction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_an_evicted_gang_releases_its_quota_after_the_last_pod(at_once):
    world = running().kueue_does(evict, "Preempted" if at_once else "PodsReadyTimeout")
    world.sees(phase="Pending", stalled="Queued", quota=True)
    assert {pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.pods.values()} == {30}
    del world.pods["job-0"]
    world.settle().sees(quota=True).finish_deletions().sees(quota=False, counts=(0, 0, 0))
    assert not workloads.true(world.workload, "Admitted")
    assert "admission" not in world.workload["status"]
    assert workloads.true(world.workload, "Requeued") is at_once
    world.kueue_does(admit).run().sees(phase="Running", attempt=2)


def test_quota_is_not_given_back_on_the_word_of_the_cache_alone():
    world = running().kueue_does(evict)
    job_0 = {"job-0": world.pods["job-0"]}
    world.pods.clear()  # a watch says so
    (read,) = world.plan().actions
    assert isinstance(read, act.ConfirmGone)
    world.pods.update(job_0)
    world.carry_out(read)
    world.settle().sees(quota=True).pods.clear()
    world.settle().sees(quota=False)


def test_a_gang_that_has_succeeded_as_it_was_evicted_has_succeeded():
    """No watch has shown that yet: a quorum is asked first."""
    world = running()
    world.kueue.touch(evict(world.workload, world.now))
    (first,) = world.plan().actions
    assert isinstance(first, act.ConfirmGone)
    assert world.all_end(0).settle().phase == "Succeeded"


def test_a_read_for_another_reason_is_not_taken_for_that_one():
    world = admitted(startupDeadlineSeconds=60)
    world.now += timedelta(seconds=61)
    world.carry_out(world.plan().actions[0])  # that no pod has a node
    (read,) = world.plan().actions
    assert read == act.ConfirmGone(1)
    world.carry_out(read)
    world.kueue.touch(evict(world.workload, world.now))
    assert world.plan().actions == (act.ConfirmGone(1, evicted=True),)


@pytest.mark.fault("U19")
def test_deactivation_ends_the_pods_and_says_how_to_go_on():
    world = running().kueue_does(workloads.deactivate).finish_deletions().sees(quota=False)
    assert not workloads.true(world.workload, "Requeued")
    world.wait(LATER).sees("spec.active")
    world.workload["spec"]["active"] = True
    world.kueue_does(admit).sees(made=3)


@pytest.mark.fault("U20")
def test_without_kueues_api_a_gang_runs_on_and_gets_no_new_pods():
    """Nor does a deadline count then, and it is told once."""
    world = running(startupDeadlineSeconds=60)
    api = world.kueue
    kueue(world, None).sees(phase="Running", made=3).end(0, 1).finish_deletions()
    hours(world).sees(phase="Restarting", attempt=2, made=0, stalled="QueueUnavailable")
    kueue(world.tells("QueueUnavailable"), api).sees(made=3)


def gone_by_hand(world):
    name, old = (world.workload["metadata"][field] for field in ("name", "uid"))
    world.cluster.delete("workloads", name)
    world.settle().sees(phase="Pending", workloads=0).finish_deletions()
    assert world.workload["metadata"]["uid"] != old


def test_a_failure_during_an_eviction_is_recorded_without_a_charge():
    world = running().end(0, 1, settle=False).kueue_does(evict)
    assert world.sees(phase="Pending", counts=(0, 0, 0)).loss["exitCode"] == 1


def test_an_eviction_is_not_called_a_suspension_by_the_user():
    world = running()
    world.status["avoidedNodes"] = ["node1"]
    evicted(world).kueue_does(admit).tells("NodesTriedAgain", "the job was admitted")


# --- While it runs, and its end -----------------------------------------------------------------


def sidecar(world, left):
    """One beside the trainer of replica 0, which has ended, is at work; or ends, too."""
    status = world.pods["job-0"]["status"]
    if left:
        status["phase"] = "Running"
        status["containerStatuses"].append({"name": "sidecar", "state": {"running": {}}})
    else:
        status["containerStatuses"].pop()
        status["phase"] = "Succeeded"
    return world.settle()


def reclaims(world, count):
    """So many pods have given their share of the quota back."""
    found = world.workload["status"].get("reclaimablePods")
    assert found == ([{"name": "trainer", "count": count}] if count else None)
    return world


def kept(world):
    """A finalizer keeps its Workload."""
    pending(world.workload, world.now)["metadata"]["deletionTimestamp"] = workloads.stamp(world.now)
    assert world.plan().actions == ()


SIDECAR = {"spec": {"containers": [*POD["containers"], {"name": "sidecar", "image": "sidecar"}]}}
RUNNING = {
    "a restart is within the quota": lambda: (
        running().end(0, 1).finish_deletions().run()
        .sees(phase="Running", attempt=2, counts=(1, 1, 0), quota=True)),
    "suspended and resumed": lambda: (
        running().patch(suspend=True).sees(phase="Suspended", quota=True)
        .finish_deletions().sees(workloads=0)
        .patch(suspend=False).sees(phase="Pending", made=0, stalled="Queued")
        .kueue_does(admit).run().sees(phase="Running", attempt=2)),
    "a template that changed over a suspension that nobody saw": lambda: (
        running().edit(suspend=True, template=OTHER).edit(suspend=False).settle()
        .finish_deletions().sees(quota=False).do(lambda w: check_asked(w, OTHER))),
    "its Workload is deleted by hand": lambda: running().do(gone_by_hand),
    "another volume for snapshots, which CEL overlooks": lambda: (
        evicted(admitted(snapshot={"path": "/s", "volume": {"hostPath": {"path": "/a"}}}))
        .patch(snapshot={"path": "/s", "volume": {"hostPath": {"type": ""}}})
        .sees(workloads=0, reason="SnapshotChanged")),
    "another queue counts once the quota is free": lambda: (
        evicted(running().label(queue="other").sees(phase="Running", made=3, queue="team"))
        .sees(queue="other")),
    "and so does none": lambda: (
        evicted(running().label().sees(phase="Running", made=3, queue="team"))
        .sees(workloads=0, made=3)),
    "a first queue ends the pods": lambda: (
        World(job_object(), kueue=Kueue(), graceful=True).settle().run().label(queue="team")
        .sees(phase="Pending", stalled="Queued", workloads=0)
        .finish_deletions().sees(queue="team")),
    "finished replicas release quota and a restart requests all": lambda: (
        reclaims(reclaims(reclaims(running().end(0, 0), 0).wait(700), 1)
                 .end(1, 1).sees(phase="Pending", stalled="Queued")
                 .finish_deletions().sees(quota=False), 0)
        .kueue_does(admit).run().sees(phase="Running")),
    "the share of a replica whose sidecar runs stays in use": lambda: (
        reclaims(sidecar(reclaims(sidecar(running(template=SIDECAR).end(0, 0), True)
                                  .wait(700), 0), False), 1)),
    "an evicted pod that does not end is named as it keeps the quota": lambda: (
        running().kueue_does(evict).do(lambda w: [w.pods.pop(f"job-{n}") for n in (1, 2)]).settle()
        .wait(3600).wait(LATER).sees("pod job-0 has not ended", stalled="WaitingForDeletion")
        .finish_deletions().wait(LATER).sees(stalled="Queued")),
    "a workload that is going is not deleted again and again": lambda: kept(running().label()),
    "a restart that a changed flavour contradicts waits without a deadline": lambda: (
        hours(offered(running(startupDeadlineSeconds=60, template=IN_A), nodeLabels={"zone": "b"})
              .restart_operator().end(0, 1).finish_deletions())
        .sees("suspend the job", stalled="Queued").tells("Queued", times=2)
        .patch(suspend=True).sees(workloads=0)),
}  # fmt: skip


@pytest.mark.parametrize("story", RUNNING.values(), ids=RUNNING)
def test_while_it_runs(story):
    story()


@pytest.mark.parametrize(("code", "end"), [(0, "Succeeded"), (2, "Failed")])
def test_the_end_of_the_job_finishes_the_workload_after_the_last_pod(code, end):
    world = running()
    world.end(0, code).end(1, 0) if code else world.all_end(0).settle()
    world.sees(phase=end, finished=None if code else end).finish_deletions().sees(finished=end)
    assert world.restart_operator().settle().plan().actions == ()


def test_a_new_operator_finishes_the_workload_of_a_job_that_ended_long_ago():
    world = running()
    api, world.kueue = world.kueue, None  # its API was away
    world.all_end(0).settle().wait(3600)
    kueue(world, api).restart_operator().settle().sees(finished="Succeeded")
