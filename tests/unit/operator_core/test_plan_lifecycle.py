"""Stories of start, success, suspension, deadlines and clean-up, told to the pure planner."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.status import Progress
from support.world import JOB_UID, World, job_object


def started(**spec: object) -> World:
    return World(job_object(**spec)).settle()


def refusal(world: World, code: int, message: str, **more: object) -> act.Refusal:
    attempt = world.status["attempt"]
    return act.Refusal(attempt, code, "Reason", message, world.now, **more)  # type: ignore[arg-type]


@pytest.mark.fault("U2")
@pytest.mark.parametrize("spec", [{"suspend": True}, {"activeDeadlineSeconds": 1}])
def test_a_gang_that_has_succeeded_has_whatever_is_asked_for_at_that_moment(spec: dict[str, Any]):
    world = started().run()
    for replica in range(3):
        world.end(replica, 0, settle=False)
    world.now += timedelta(seconds=10)
    assert world.patch(**spec).phase == "Succeeded"


@pytest.mark.parametrize("spec", [{"activeDeadlineSeconds": 60}, {"startupDeadlineSeconds": 60}])
@pytest.mark.fault("O2")
def test_no_deadline_is_decided_on_a_stale_cache(spec: dict[str, Any]):
    world = started(**spec)
    stale = copy.deepcopy(world.pods)
    for replica in range(3):
        if "activeDeadlineSeconds" in spec:
            world.end(replica, 0, settle=False)
        else:
            world._state(replica, "Running", {"running": {}})
    real, world.pods = world.pods, stale  # the watch is behind
    world.now += timedelta(seconds=60)
    (report,) = world.plan().actions  # of the counts
    assert isinstance(report, act.WriteStatus)
    assert report.status["phase"] == "Starting"
    world.carry_out(report)
    (read,) = world.plan().actions
    assert read == act.ConfirmGone(1)
    world.pods = real
    world.carry_out(read)
    assert world.settle().phase in ("Running", "Succeeded")
    assert world.status["restarts"]["total"] == 0


@pytest.mark.fault("U2")
def test_a_suspension_waits_for_a_last_look_at_who_may_be_done():
    world = started().run().wait(30)
    stale = copy.deepcopy(world.pods)
    for replica in range(3):
        world.end(replica, 0, settle=False)
    real, world.pods = world.pods, stale  # the watch is behind
    world.job["spec"]["suspend"] = True
    world.job["metadata"]["generation"] += 1
    (read,) = world.plan().actions
    assert read == act.ConfirmGone(1)
    world.pods = real
    world.carry_out(read)
    assert world.settle().phase == "Succeeded"


@pytest.mark.parametrize("behind", [timedelta(), timedelta(hours=1)])
@pytest.mark.fault("A6")
def test_time_in_which_nobody_saw_or_acted_does_not_count_for_the_start(behind: timedelta):
    """Behind: the clock of the machine on which the next operator runs."""
    world = started(startupDeadlineSeconds=600)
    for replica in range(3):
        world.waiting(replica, "ContainerCreating")
    world.now += timedelta(hours=2) - behind * 3  # the API server was away
    world.feedback = replace(world.feedback, seen_since=world.now)
    assert world.wait(599).status["attempt"] == 1
    assert world.wait(2).status["attempt"] == 2
    assert world.status["lastFailure"]["class"] == "Startup"


@pytest.mark.fault("U4")
def test_a_stall_is_told_though_the_gang_was_begun_by_a_clock_ahead_of_ours():
    world = started()
    for replica in range(3):
        world.waiting(replica, "ContainerCreating")
    world.restart_operator()
    world.now -= timedelta(hours=1)
    world.feedback = replace(world.feedback, seen_since=world.now)
    assert world.wait(20).condition("Stalled")["reason"] == "ContainerCreating"
    assert world.run().condition("Stalled")["status"] == "False"


def test_replicas_that_do_not_end_when_others_are_done_are_told():
    world = started().run().end(0, 0).end(2, 0)
    assert world.wait(2).plan().requeue_after == 598
    assert world.wait(500).condition("Stalled") == {}
    world.wait(98)
    stalled = world.condition("Stalled")
    assert stalled["reason"] == "WaitingForReplicas"
    assert stalled["message"] == "replicas 0,2 have succeeded, and 1 has not ended"
    assert world.end(1, 0).phase == "Succeeded"
    assert world.condition("Stalled")["status"] == "False"


def test_the_step_after_which_replicas_ended_before_others_is_told():
    report = '{"version":1,"kind":"success","code":0,"step":12}'
    world = started().run().end(0, 0, message=report).wait(600)
    told = world.condition("Stalled")["message"]
    assert told == "replica 0 has succeeded after step 12, and 1-2 have not ended"


def test_ten_thousand_replicas_of_which_each_second_one_is_done_are_told_in_a_bounded_message():
    """One that the CRD refuses would be written again and again, and nothing else be done."""
    world = started().run()
    world.job["spec"]["replicas"] = 10_000
    world.status["succeededReplicas"] = ",".join(str(n) for n in range(0, 10_000, 2))
    world.now += timedelta(seconds=600)
    (write,) = world.plan().actions
    assert isinstance(write, act.WriteStatus)
    world.carry_out(write)
    told = world.condition("Stalled")
    assert (told["reason"], len(told["message"]) <= observe.MESSAGE_MAX) == (
        "WaitingForReplicas",
        True,
    )
    assert told["message"].startswith("replicas 0,2,4,")
    assert " have succeeded, and 1,3,5," in told["message"]
    assert told["message"].endswith(" have not ended")
    assert all(len(event.message) <= observe.MESSAGE_MAX for event in write.events)


@pytest.mark.parametrize("told_before", [False, True])
def test_replicas_that_do_not_end_are_told_though_the_pods_of_the_others_are_gone(told_before):
    world = started().run().end(0, 0)
    world.wait(600 if told_before else 1).vanish(0).wait(600)
    stalled = world.condition("Stalled")
    assert (stalled["reason"], stalled["status"]) == ("WaitingForReplicas", "True")
    assert stalled["message"] == "replica 0 has succeeded, and 1-2 have not ended"


def test_a_finished_pod_that_is_drained_is_not_a_lost_one():
    world = started().run().end(0, 0).vanish(0)
    assert world.status["attempt"] == 1
    assert world.end(1, 0).end(2, 0).phase == "Succeeded"


def test_success_before_all_ran_still_counts():
    world = started()
    for replica in range(3):
        world.end(replica, 0)
    assert world.phase == "Succeeded"


@pytest.mark.parametrize("code", [0, 2])
def test_the_end_is_absorbing(code: int):
    world = started().run()
    for replica in range(3):
        world.end(replica, code, settle=False)
    world.settle()
    phase, log = world.phase, list(world.log)
    world.pods.clear()
    world.settle().wait(1000)
    world.patch(suspend=True)
    answered = f"status {phase} 1"  # and nothing else
    assert (world.phase, world.log) == (phase, [*log, answered])
    assert world.status["observedGeneration"] == 2
    assert world.settle().log == [*log, answered]


def test_clean_up_keeps_finished_pods_unless_all_are_to_go():
    world = started().run().end(0, 2)
    assert set(world.pods) == {"job-0"}
    world = started(cleanPodPolicy="All").run().end(0, 2)
    assert world.pods == {}


@pytest.mark.parametrize("code", [0, 2])
def test_a_pod_whose_phase_lags_behind_its_containers_keeps_its_log(code: int):
    world = started().run()
    for replica in range(3):
        world.end(replica, code, settle=False)
        world.pods[f"job-{replica}"]["status"]["phase"] = "Running"
    world.settle()
    assert len(world.pods) == 3


def test_a_sidecar_does_not_keep_a_replica_from_succeeding():
    template = {"spec": {"containers": [{"name": "trainer"}, {"name": "side"}]}}
    world = started(template=template).run()
    for replica in range(3):
        world.end(replica, 0, settle=False)
        world.pods[f"job-{replica}"]["status"]["phase"] = "Running"
    assert world.settle().phase == "Succeeded"
    assert world.pods == {}


def test_time_to_live_deletes_the_job():
    world = started(ttlSecondsAfterFinished=60).run().end(0, 2)
    assert world.plan().requeue_after == 60
    world.now = world.now.replace(minute=world.now.minute + 1)
    assert isinstance(world.plan().actions[-1], act.DeleteJob)


def test_suspend_keeps_the_grace_period_and_resume_is_a_new_attempt():
    world = started().run()
    world.graceful = True
    world.patch(suspend=True)
    assert world.phase == "Suspended"
    assert world.pods["job-0"]["metadata"]["deletionGracePeriodSeconds"] == 30
    told = world.wait(2).condition("Suspended")
    assert (told["status"], told["reason"]) == ("False", "Suspending")
    assert world.status["replicas"]["active"] == 3
    world.end(0, 0).end(1, 143).wait(2)
    assert (world.status["replicas"]["active"], world.condition("Suspended")["status"]) == (
        1,
        "False",
    )
    world.finish_deletions().wait(2)
    told = world.condition("Suspended")
    assert (told["status"], told["reason"]) == ("True", "Suspended")
    assert told["message"] == "spec.suspend is true: set it to false to go on"
    assert world.status["replicas"]["active"] == 0
    assert [e.reason for e in world.events][-2:] == ["Suspending", "Suspended"]
    world.patch(suspend=False).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 2)
    assert world.status["restarts"]["total"] == 0
    assert world.condition("Suspended")["status"] == "False"


def unlabelled(world: World, replica: int) -> World:
    """Somebody takes our label off a pod: the watch says that it is gone, and it runs on."""
    name = f"job-{replica}"
    uid = world.pods.pop(name)["metadata"]["uid"]
    world.hidden[name] = act.Existing("Pod", name, JOB_UID, 1, False, "DDPJob job", uid)
    return world


@pytest.mark.fault("N11")
def test_a_pod_without_its_labels_ends_with_the_others_when_the_job_is_suspended():
    world = unlabelled(started().run(), 1).patch(suspend=True)
    assert world.log.count("delete job-1 hidden") == 1
    assert world.condition("Suspended")["reason"] == "Suspending"
    assert world.wait(2).status["replicas"]["active"] == 1
    assert world.wait(2).plan().requeue_after == 11
    world.hidden.clear()
    assert world.wait(11).condition("Suspended")["status"] == "True"
    assert world.wait(2).plan() == act.Plan()


@pytest.mark.fault("N11")
def test_a_pod_without_its_labels_ends_with_the_others_at_the_end_of_the_job():
    world = unlabelled(started().run(), 1)
    world.end(0, 2)
    assert world.phase == "Failed"
    assert world.log.count("delete job-1 hidden") == 1
    assert world.plan() == act.Plan()
    later = started().run().end(0, 2)
    later.restart_operator().now += timedelta(hours=1)
    assert later.plan() == act.Plan(), "an operator that starts asks nothing of what ended long ago"


def test_active_deadline():
    world = started(activeDeadlineSeconds=100).run().wait(99)
    assert world.phase == "Running"
    assert world.wait(1).phase == "Failed"
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert world.pods == {}


def test_the_active_deadline_stands_still_while_suspended():
    world = started(activeDeadlineSeconds=100).run().patch(suspend=True).wait(500)
    assert world.phase == "Suspended"
    assert world.patch(suspend=False).run().wait(99).phase == "Running"


def test_startup_deadline_is_charged():
    world = started(startupDeadlineSeconds=60, restart={"maxRestarts": 1}).run(0, 1)
    world.waiting(2, "ErrImagePull", "no such image")
    assert world.condition("Stalled")["reason"] == "ImagePullBackOff"
    assert "no such image" in world.condition("Stalled")["message"]
    assert world.wait(60).status["attempt"] == 2
    assert world.status["lastFailure"]["class"] == "Startup"
    assert "no such image" in world.status["lastFailure"]["message"]
    for replica in range(3):
        world.waiting(replica, "ErrImagePull", "no such image")
    assert world.wait(60).phase == "Failed"


def test_waiting_for_capacity_releases_all_and_is_not_charged():
    world = started(startupDeadlineSeconds=60).run(0, 1)
    conditions = [{"type": "PodScheduled", "status": "False", "message": (
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate, "
        "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
    )}]  # fmt: skip
    world.pods["job-2"]["status"] = {"phase": "Pending", "conditions": conditions}
    assert world.settle().condition("Stalled") == {}  # it may pass in a moment
    assert world.wait(5).condition("Stalled")["reason"] == "Unschedulable"
    assert world.status["message"] == "2 Insufficient nvidia.com/gpu"
    world.wait(55)
    assert (world.phase, world.pods) == ("Pending", {})
    assert world.status["restarts"]["total"] == 0
    assert world.wait(9).phase == "Starting"


def test_quota_releases_what_was_created_and_tries_again():
    world = World()
    world.refuse = lambda action: (
        refusal(world, 403, "exceeded quota: pods") if action.replica == 2 else None
    )
    world.settle()
    assert (world.phase, world.pods) == ("Pending", {})
    assert world.condition("Stalled")["reason"] == "QuotaExceeded"
    assert world.wait(2).phase == "Pending"  # refused again
    assert len([e for e in world.events if e.reason == "QuotaExceeded"]) == 2
    world.refuse = lambda _: None
    assert world.wait(3).run().phase == "Running"
    assert world.status["restarts"]["total"] == 0
    assert world.condition("Stalled")["status"] == "False"


def test_a_foreign_pod_in_the_way_is_named_and_waited_for():
    world = World()
    stranger = act.Existing("Pod", "job-1", None, None, False)
    world.refuse = lambda action: (
        refusal(world, 409, "exists", existing=stranger) if action.replica == 1 else None
    )
    world.settle()
    assert world.condition("Stalled")["reason"] == "NameConflict"
    assert "job-1" in world.condition("Stalled")["message"]
    world.refuse = lambda _: None
    world.wait(9)
    assert "job-1" not in world.pods
    assert "job-1" in world.wait(1).pods


def test_what_a_deleted_namesake_left_is_waited_for():
    world = World()
    left = act.Existing("Service", "job", "older uid", None, False, "DDPJob job")
    world.refuse_network = lambda _: refusal(world, 409, "exists", existing=left)
    world.settle()
    assert world.condition("Stalled")["reason"] == "WaitingForDeletion"
    world.refuse_network = lambda _: None
    assert len(world.wait(3).pods) == 3


def test_a_foreign_service_in_the_way_stops_before_the_first_pod():
    world = World()
    stranger = act.Existing("Service", "job", None, None, False)
    world.refuse_network = lambda _: refusal(world, 409, "exists", existing=stranger)
    world.settle()
    assert world.pods == {}
    assert world.condition("Stalled")["reason"] == "NameConflict"
    world.refuse_network = lambda _: None
    assert len(world.wait(10).pods) == 3


def test_a_pod_that_takes_long_to_go_or_to_start_is_named():
    world = started().run()
    world.graceful = True
    world.end(0, 1).wait(20)
    assert world.condition("Stalled")["reason"] == "WaitingForDeletion"
    world.finish_deletions()
    world.waiting(1, "ContainerCreating").wait(20)
    assert world.condition("Stalled")["reason"] == "ContainerCreating"
    assert "kubectl describe pod" in world.condition("Stalled")["message"]
    assert world.run().condition("Stalled")["status"] == "False"


def test_a_pod_that_no_scheduler_looks_at_is_named():
    world = started().wait(19)
    assert world.condition("Stalled") == {}
    stalled = world.wait(1).condition("Stalled")
    assert stalled["reason"] == "Unschedulable"
    assert "no scheduler has looked at it" in stalled["message"]


def deleted(world: World) -> World:
    """It stays for as long as somebody's finalizer keeps it."""
    world.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.graceful = True
    world.log.clear()
    return world


def leaving(world: World) -> set[str]:
    return {name for name, pod in world.pods.items() if "deletionTimestamp" in pod["metadata"]}


@pytest.mark.parametrize("ran", [False, True])
def test_a_job_in_deletion_is_left_to_the_garbage_collector(ran: bool):
    world = started(activeDeadlineSeconds=100)
    world = deleted(world.run() if ran else world).settle().wait(50)
    assert (world.log, leaving(world)) == ([], set())


@pytest.mark.fault("U9")
@pytest.mark.parametrize("why", ["failed", "gone", "deadline", "suspended"])
def test_the_gang_of_a_job_in_deletion_ends_once_it_is_broken_or_late(why: str):
    """No pod is made and nothing is told; each has its own grace period."""
    world = deleted(started(activeDeadlineSeconds=100).run())
    before = world.status
    if why == "failed":
        world.end(1, 1)
    elif why == "gone":
        world.vanish(1)
    elif why == "suspended":
        world.patch(suspend=True)
    else:
        assert world.wait(2).plan().requeue_after == 98
        world.wait(98)
    assert {"job-0", "job-2"} <= leaving(world)
    assert {p["metadata"].get("deletionGracePeriodSeconds", 30) for p in world.pods.values()} == {
        30
    }
    world.finish_deletions().wait(100)
    assert (world.status, [one for one in world.log if "delete" not in one]) == (before, [])


def test_reports_are_held_back_but_decisions_are_not():
    world = started()
    for replica in range(3):
        world._state(replica, "Running", {"running": {}})
    world.settle()
    assert world.phase == "Running"
    world.pods["job-0"]["status"]["containerStatuses"][0]["ready"] = True
    assert world.plan().actions == ()
    assert world.plan().requeue_after == 2.0
    world.wait(2)
    assert world.status["ready"] == "1/3"


def test_progress_is_merged_and_quiet_polls_write_nothing():
    world = started().run().wait(2)
    world.feedback = replace(
        world.feedback, progress=Progress(step=10, loss=0.5, updated_at=world.now)
    )
    world.settle()
    assert world.status["progress"]["step"] == 10
    assert world.status["progress"]["stepOfTotal"] == "10"
    world.log.clear()
    world.wait(30)
    world.feedback = replace(world.feedback, progress=Progress(step=10, updated_at=world.now))
    world.settle()
    assert world.log == []


@pytest.mark.parametrize(("minutes", "most"), [(1, 4), (10, 40), (60, 90)])
def test_progress_is_written_ever_more_seldom(minutes: int, most: int):
    """Told every 15 s; while young often, for people watch; later O(1) per job and minute."""
    world = started().run()
    world.log.clear()
    for step in range(minutes * 4):
        told = Progress(step=step + 1, updated_at=world.now)
        world.feedback = replace(world.feedback, progress=told)
        world.wait(15)
    assert 0 < len(world.log) <= most
    world.log.clear()
    world.pods["job-0"]["status"]["containerStatuses"][0]["ready"] = False
    world.wait(2)  # what is not progress alone is not held back by it
    assert world.log == ["status Running 1"]
    world.log.clear()
    world.end(0, 0)
    assert world.log == ["status Running 1"]
    assert world.status["progress"]["step"] == minutes * 4


@pytest.mark.parametrize("polled", [None, 380])
def test_the_last_words_of_replica_0_are_the_final_progress(polled: int | None):
    """A job that is done would read 380/400: what was polled is older than its report."""
    report = '{"version":1,"kind":"success","step":400,"loss":0.01,"snapshotStep":400}'
    world = started().run()
    if polled:
        told = Progress(step=polled, total_steps=400, snapshot_step=350, updated_at=world.now)
        world.feedback = replace(world.feedback, progress=told)
    world.end(1, 0).end(2, 0).end(0, 0, message=report)
    assert world.status["phase"] == "Succeeded"
    assert world.status["progress"]["step"] == world.status["progress"]["totalSteps"] == 400
    assert world.status["progress"]["stepOfTotal"] == "400/400"
    assert world.status["progress"]["snapshotStep"] == 400


@pytest.mark.fault("U6")
@pytest.mark.parametrize("how", ["vanished", "deleted"])
def test_a_member_removed_while_starting_is_a_disruption_like_any_other(how: str):
    world = started(restart={"maxDisruptions": 3}).run(0, 1)
    for disruption in range(3):
        world = world.vanish(2) if how == "vanished" else world.terminate(2)
        assert world.status["attempt"] == disruption + 2
        assert world.wait(10).run(0, 1).status["restarts"]["disruptions"] == disruption + 1
        assert world.status["lastFailure"]["reason"] == "PodDeleted"
    assert world.vanish(2).condition("Failed")["reason"] == "MaxDisruptionsExceeded"
    assert world.status["restarts"]["charged"] == 0


def test_lost_steps_are_measured():
    world = started().run()
    world.end(1, 137, message='{"version":1,"kind":"signal","step":60,"snapshotStep":50}')
    lost = [m.value for m in world.measurements if m.name == "lost_steps"]
    assert lost == [10]
