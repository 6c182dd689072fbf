"""Stories of start, success, suspension, deadlines and clean-up, told to the pure planner."""

import copy
import re
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_contract.exits import DEAD_GANG_SECONDS
from ddpjob_operator.core import actions as act
from ddpjob_operator.shell.api import Forbidden
from support.gitops import kstatus
from support.world import World, job_object, refusal, running, started


@pytest.mark.fault("O2", "U2")
@pytest.mark.parametrize("what", ["activeDeadlineSeconds", "startupDeadlineSeconds", "suspend"])
def test_neither_a_deadline_nor_a_suspension_is_decided_on_a_stale_cache(what):
    world = running().wait(30) if what == "suspend" else started(**{what: 60})
    stale = copy.deepcopy(world.pods)
    world = world.all_run() if what == "startupDeadlineSeconds" else world.all_end(0)
    real, world.pods = dict(world.pods), stale  # the watch is behind
    if what == "suspend":
        world.edit(suspend=True)
    else:
        world.now += timedelta(seconds=60)
        (report,) = world.plan().actions  # of the counts
        world.carry_out(report)
        assert world.phase == "Starting"
    (read,) = world.plan().actions
    assert read == act.ConfirmGone(1)
    world.pods = real
    world.carry_out(read)
    assert world.settle().phase == ("Running" if what == "startupDeadlineSeconds" else "Succeeded")
    assert world.counts[0] == 0


@pytest.mark.parametrize("behind", [timedelta(), timedelta(hours=1)])
@pytest.mark.fault("A6")
def test_time_in_which_nobody_saw_or_acted_does_not_count_for_the_start(behind):
    """Behind: the clock of the machine on which the next operator runs."""
    world = started(startupDeadlineSeconds=600).all_wait("ContainerCreating")
    world.now += timedelta(hours=2) - behind * 3  # the API server was away
    world.sees_from_now()
    assert world.wait(599).status["attempt"] == 1
    assert world.wait(2).status["attempt"] == 2
    assert world.loss["class"] == "Startup"


@pytest.mark.fault("U4")
def test_a_stall_is_reported_after_a_start_by_a_fast_clock():
    world = started().all_wait("ContainerCreating").restart_operator()
    world.now -= timedelta(hours=1)
    world.sees_from_now()
    assert world.wait(20).stalled == "ContainerCreating"
    assert world.run().stalled == ""


def test_replicas_that_do_not_end_when_others_are_done_are_told():
    world = running().end(0, 0).end(2, 0)
    assert world.wait(2).plan().requeue_after == 598
    assert world.wait(500).condition("Stalled") == {}
    world.wait(98)
    assert world.stalled == "WaitingForReplicas"
    said = world.condition("Stalled")["message"]
    assert said == "replicas 0,2 have succeeded, and 1 has not ended"
    assert world.end(1, 0).phase == "Succeeded"
    assert not world.stalled


@pytest.mark.parametrize("gone", [None, 600, 1])
def test_replicas_that_do_not_end_are_reported_with_the_others_step(gone):
    report = "" if gone else '{"version":1,"kind":"success","code":0,"step":12}'
    world = running().end(0, 0, message=report).wait(gone or 1)
    world = (world.vanish(0) if gone else world).wait(600)
    after = "" if gone else " after step 12"
    said = f"replica 0 has succeeded{after}, and 1-2 have not ended"
    assert (world.stalled, world.condition("Stalled")["message"]) == ("WaitingForReplicas", said)


def test_a_message_about_ten_thousand_replicas_fits_the_crd():
    world = running()
    world.job["spec"]["replicas"] = 10_000
    world.status["succeededReplicas"] = ",".join(str(n) for n in range(0, 10_000, 2))
    world.now += timedelta(seconds=600)
    (write,) = world.plan().actions
    world.carry_out(write)
    said = world.condition("Stalled")["message"]
    assert re.fullmatch("replicas 0,2,4,.* have succeeded, and 1,3,5,.* have not ended", said)
    assert max(len(text) for text in (said, *world.told("WaitingForReplicas"))) <= 1024


def test_a_success_stays_whatever_becomes_of_its_pod():
    assert running().end(0, 0).end(0, 137, reason="ContainerStatusUnknown").status["attempt"] == 1
    world = running().end(0, 0).vanish(0)
    assert world.status["attempt"] == 1
    assert world.end(1, 0).end(2, 0).phase == "Succeeded"


@pytest.mark.parametrize("code", [0, 2])
def test_the_end_is_absorbing(code):
    world = running().all_end(code).settle()
    phase, log = world.phase, list(world.log)
    world.pods.clear()
    world.settle().wait(1000).patch(suspend=True).settle()
    answered = f"status {phase} 1"  # of the generation, and nothing else
    assert (world.phase, world.log) == (phase, [*log, answered])
    assert world.status["observedGeneration"] == 2


TWO = {"spec": {"containers": [{"name": "trainer"}, {"name": "side"}]}}
NATIVE = {
    "spec": {
        "initContainers": [{"name": "fetch"}, {"name": "proxy", "restartPolicy": "Always"}],
        "containers": [{"name": "trainer"}],
    }
}


@pytest.mark.parametrize(
    ("spec", "code", "lagging", "phase", "left"),
    [
        ({}, 2, "", "Failed", 3),  # finished pods stay for their logs
        ({}, 2, "Running", "Failed", 3),  # their phase lags behind their containers
        ({}, 0, "Running", "Succeeded", 3),
        ({"template": TWO}, 0, "Running", "Succeeded", 0),  # a sidecar that still runs
        ({"template": NATIVE}, 0, "Running", "Succeeded", 3),  # it ends by itself
        ({"template": NATIVE}, 2, "Running", "Failed", 3),
        ({"cleanPodPolicy": "All"}, 2, "", "Failed", 0),
    ],
)
def test_clean_up_keeps_finished_pods_unless_all_are_to_go(spec, code, lagging, phase, left):
    world = running(**spec).all_end(code, phase=lagging).settle()
    assert (world.phase, len(world.pods)) == (phase, left)
    assert started(**spec).all_end(code, phase=lagging).settle().phase == phase, "before all ran"


def test_time_to_live_deletes_the_job():
    world = started(ttlSecondsAfterFinished=60).run().end(0, 2)
    assert world.plan().requeue_after == 60
    world.now = world.now.replace(minute=world.now.minute + 1)
    assert isinstance(world.plan().actions[-1], act.DeleteJob)


def test_suspend_keeps_the_grace_period_and_resume_is_a_new_attempt():
    world = running(graceful=True).patch(suspend=True)
    assert world.phase == "Suspended"
    assert world.pods["job-0"]["metadata"]["deletionGracePeriodSeconds"] == 30

    def told() -> tuple[str, str, int]:
        found = world.wait(2).condition("Suspended")
        return found["status"], found["reason"], world.status["replicas"]["active"]

    assert told() == ("False", "Suspending", 3)
    world.end(0, 0).end(1, 143)
    assert told() == ("False", "Suspending", 1)
    world.finish_deletions()
    assert told() == ("True", "Suspended", 0)
    (said,) = world.told("Suspended")
    assert said == "spec.suspend is true: set it to false to go on"
    world.patch(suspend=False).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 2)
    assert world.status["restarts"]["total"] == 0
    assert world.condition("Suspended")["status"] == "False"


def frozen(world: World, words: str) -> World:
    """A policy refuses every deletion, and the operator tries."""
    world.wire.gate = lambda call: refusal(403, words) if call.verb == "delete" else ""
    for _ in range(9):
        with suppress(Forbidden):
            world.carry_out(*world.plan().actions)
    return world


@pytest.mark.fault("A10")
@pytest.mark.parametrize("why", ["suspended", "failed"])
def test_pods_whose_deletion_is_refused_are_told_and_counted(why):
    world = (
        running().edit(suspend=True) if why == "suspended" else running().end(1, 1, settle=False)
    )
    words = 'admission webhook "freeze" denied the request: no deletions before Monday'

    frozen(world, words)
    assert world.stalled == "", "a blink of the API server is no news"
    world.now += timedelta(seconds=21)
    frozen(world, words)
    assert world.stalled == world.status["reason"] == "DeletionRefused"
    assert world.condition("Stalled")["message"].startswith("pod job-0 cannot be deleted: ")
    assert words in world.condition("Stalled")["message"]
    if why == "suspended":
        assert (world.phase, world.status["ready"]) == ("Suspended", "3/3")
    world.wire.gate = lambda _: ""
    world.wait(21)
    if why == "failed":
        world.run()
    assert world.stalled == ""
    assert world.condition("Suspended").get("status", "True") == "True"


@pytest.mark.fault("A10")
def test_a_deletion_refused_after_the_end_is_an_event_for_each_pod():
    """A job at its end has no condition for it."""
    world = frozen(running(cleanPodPolicy="All").all_end(2), "no deletions before Monday")
    assert (world.phase, len(world.pods)) == ("Failed", 3)
    said = [f"pod job-{n} cannot be deleted: no deletions before Monday" for n in range(3)]
    assert world.told("DeletionRefused") == said
    world.wire.gate = lambda _: ""
    assert (dict(world.settle().pods), world.feedback.undeleted) == ({}, {})


def test_the_active_deadline_stands_still_while_suspended():
    world = started(activeDeadlineSeconds=100).run().patch(suspend=True).wait(500)
    assert world.phase == "Suspended"
    assert world.patch(suspend=False).run().wait(99).phase == "Running"
    assert world.wait(1).phase == "Failed"
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert world.pods == {}


def test_startup_deadline_is_charged():
    world = started(startupDeadlineSeconds=60, restart={"maxRestarts": 1}).run(0, 1)
    world.waiting(2, "ErrImagePull", "no such image")
    assert world.stalled == "ImagePullBackOff"
    assert "no such image" in world.condition("Stalled")["message"]
    assert world.wait(60).status["attempt"] == 2
    assert world.loss["class"] == "Startup"
    assert "no such image" in world.loss["message"]
    assert world.all_wait("ErrImagePull").wait(60).phase == "Failed"


def test_waiting_for_capacity_releases_all_and_is_not_charged():
    world = started(startupDeadlineSeconds=60).run(0, 1)
    conditions = [{"type": "PodScheduled", "status": "False", "message": (
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate, "
        "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
    )}]  # fmt: skip
    world.pods["job-2"]["status"] = {"phase": "Pending", "conditions": conditions}
    assert not world.settle().stalled  # it may pass in a moment
    assert world.wait(5).stalled == "Unschedulable"
    assert world.status["message"] == "2 Insufficient nvidia.com/gpu"
    world.wait(55)
    assert (world.phase, world.pods) == ("Pending", {})
    assert world.status["restarts"]["total"] == 0
    assert world.wait(9).phase == "Starting"


@pytest.mark.parametrize(
    ("kind", "owner", "reason"),
    [
        ("Pod", None, "NameConflict"),
        ("Service", None, "NameConflict"),
        ("Service", "DDPJob job", "WaitingForDeletion"),  # of a deleted namesake
    ],
)
def test_an_object_in_the_way_is_named_and_waited_for(kind, owner, reason):
    name = "job-1" if kind == "Pod" else "job"
    plural = {"Pod": "pods", "Service": "services"}[kind]
    world = World().occupy(plural, name, owner=owner).settle()
    assert world.stalled == reason
    assert name in world.condition("Stalled")["message"]
    assert [pod for pod in world.pods if pod != name] == (["job-0"] if kind == "Pod" else [])
    world.cluster.delete(plural, name)
    assert len(world.wait(10).pods) == 3


AT = "2026-01-01T00:00:00Z"
RUNS = {"state": {"running": {"startedAt": AT}}, "started": True}
DONE = {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}, "started": False}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, "reason": reason, "message": message}}}


def beside(world: World, **inits: dict[str, Any]) -> World:
    """The init containers of replica 0 are so."""
    statuses = [{"name": name, **status} for name, status in inits.items()]
    world.pods["job-0"]["status"]["initContainerStatuses"] = statuses
    return world.settle()


@pytest.mark.fault("N16")
def test_a_native_sidecar_counts_for_nothing_and_ends_with_its_pod():
    world = beside(running(template=NATIVE, graceful=True), fetch=DONE, proxy=RUNS)
    for state in (ended(1), {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}):
        assert beside(world, fetch=DONE, proxy={**state, "started": True}).phase == "Running"
        assert (world.counts, world.stalled) == ((0, 0, 0), "")
    beside(world, fetch=DONE, proxy=RUNS).end(0, 1, settle=False)
    pod = world.pods["job-0"]
    pod["status"] |= {"phase": "Running", "initContainerStatuses": [{"name": "proxy", **RUNS}]}
    meta = world.settle().pods["job-0"]["metadata"]
    assert meta["deletionGracePeriodSeconds"] == DEAD_GANG_SECONDS, "not by force"


NOT_STARTED = {**RUNS, "started": False}
BACK_OFF = {
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}},
    "lastState": ended(3)["state"],
}


@pytest.mark.fault("N16")
@pytest.mark.parametrize(
    ("inits", "says"),
    [
        ({"fetch": NOT_STARTED}, "fetch has run since 00:00:00 UTC, and the trainer starts after"),
        ({"fetch": DONE, "proxy": NOT_STARTED}, "proxy has run since 00:00:00 UTC"),
        ({"fetch": DONE, "proxy": BACK_OFF}, "proxy ends again and again, last with exit code 3"),
        ({"fetch": DONE, "proxy": ended(3)}, "proxy ends again and again, last with exit code 3"),
    ],
)
def test_an_init_container_that_holds_up_the_start_is_named_with_its_state(inits, says):
    world = started(template=NATIVE, restart={"maxRestarts": 0}).run(1, 2)
    beside(world.waiting(0, "PodInitializing"), **inits).wait(20)
    assert world.stalled == "InitContainerPending"
    assert world.status["message"].startswith(f"init container {says}"[:79])
    world.wait(601)
    assert world.loss["class"] == "Startup"
    assert f"init container {says}" in world.condition("Failed")["message"]


@pytest.mark.fault("N16")
def test_a_failed_init_container_is_seen_before_the_pods_phase():
    world = started(template=NATIVE).waiting(0, "PodInitializing")
    beside(world, fetch=ended(128, "StartError", "runc create failed: no space left on device"))
    assert (world.loss["class"], world.loss["reason"]) == ("Infrastructure", "StartError")
    assert "no space left on device" in world.loss["message"]


@pytest.mark.fault("N8")
def test_a_pod_that_takes_long_to_go_or_to_start_is_named():
    world = running(graceful=True).end(0, 1).wait(20)
    assert world.stalled == "WaitingForDeletion"
    world.finish_deletions()
    world.waiting(1, "ContainerCreating").wait(20)
    assert world.stalled == "ContainerCreating"
    assert "involvedObject.name=job-1" in world.condition("Stalled")["message"]
    assert world.run().stalled == ""


def test_a_pod_that_no_scheduler_looks_at_is_named():
    world = started().wait(19)
    assert not world.stalled
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
def test_a_job_in_deletion_is_left_to_the_garbage_collector(ran):
    world = started(activeDeadlineSeconds=100)
    world = deleted(world.run() if ran else world).settle().wait(50)
    assert (world.log, leaving(world)) == ([], set())


@pytest.mark.fault("U9")
@pytest.mark.parametrize("why", ["failed", "gone", "deadline", "suspended"])
def test_the_gang_of_a_job_in_deletion_ends_once_it_is_broken_or_late(why):
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
    world = started().all_run().settle()
    assert world.phase == "Running"
    world.pods["job-0"]["status"]["containerStatuses"][0]["ready"] = True
    assert world.plan().actions == ()
    assert world.plan().requeue_after == 2.0
    world.wait(2)
    assert world.status["ready"] == "1/3"


def test_progress_that_is_held_back_is_stored_by_itself_later():
    """Nothing else need happen: no newer progress, and no event."""
    world = running()
    world.wait(1800).poll(step=1)
    world.now += timedelta(seconds=4)
    world.poll(step=2)
    told = world.now
    while world.status["progress"]["step"] == 1:
        pause = world.plan().requeue_after
        assert pause is not None
        world.wait(pause)
    assert world.now - told <= timedelta(seconds=60)


@pytest.mark.parametrize(("minutes", "most"), [(1, 4), (10, 40), (60, 90)])
def test_progress_is_written_ever_more_seldom(minutes, most):
    """Told every 15 s; while young often, for people watch; later O(1) per job and minute."""
    world = running()
    world.log.clear()
    for step in range(minutes * 4):
        world.poll(step=step + 1).wait(15)
    assert 0 < len(world.log) <= most
    world.log.clear()
    world.pods["job-0"]["status"]["containerStatuses"][0]["ready"] = False
    world.wait(2)  # what is not progress alone is not held back by it
    assert world.log == ["status Running 1"]
    world.log.clear()
    world.end(0, 0)
    assert world.log == ["status Running 1"]
    assert world.status["progress"]["step"] == minutes * 4


def test_of_many_jobs_each_is_written_more_seldom_while_it_is_young_too():
    world = running()
    world.report_after = timedelta(seconds=40)
    world.log.clear()
    for step in range(8):  # two minutes
        world.poll(step=step + 1).wait(15)
    assert len(world.log) == 2
    world.pods["job-0"]["status"]["containerStatuses"][0]["ready"] = False
    world.wait(2)
    assert len(world.log) == 3, "only progress is"


@pytest.mark.parametrize("polled", [None, 380])
def test_the_last_words_of_replica_0_are_the_final_progress(polled):
    """A job that is done would read 380/400: what was polled is older than its report."""
    report = '{"version":1,"kind":"success","step":400,"loss":0.01,"snapshotStep":400}'
    world = running()
    if polled:
        world.poll(step=polled, totalSteps=400, snapshotStep=350)
    world.end(1, 0).end(2, 0).end(0, 0, message=report)
    told = world.status["progress"]
    assert (world.phase, told["stepOfTotal"], told["snapshotStep"]) == ("Succeeded", "400/400", 400)


@pytest.mark.fault("U6")
@pytest.mark.parametrize("there", [(0, 1), (0, 1, 2)], ids=["starting", "running"])
@pytest.mark.parametrize("how", ["vanished", "deleted"])
def test_a_member_removed_is_a_disruption_like_any_other(how, there):
    world = started(restart={"maxDisruptions": 3}).run(*there)
    for disruption in range(3):
        world = world.vanish(2) if how == "vanished" else world.terminate(2)
        if how == "deleted" and len(there) == 3:
            world.end(2, 143)
        assert world.status["attempt"] == disruption + 2
        assert world.wait(10).run(*there).status["restarts"]["disruptions"] == disruption + 1
        assert world.loss["reason"] == "PodDeleted"
    assert world.vanish(2).condition("Failed")["reason"] == "MaxDisruptionsExceeded"
    assert world.status["restarts"]["charged"] == 0


def with_resources(**resources: object) -> World:
    container = {"name": "trainer", "image": "i", "resources": resources}
    template = {"spec": {"containers": [{"name": "log", "image": "i"}, container]}}
    return World(job_object(template=template)).settle()


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"limits": {"cpu": "10m", "memory": "64Mi"}},
         "limits.cpu 10m (at least 100m), limits.memory 64Mi (at least 400Mi)"),
        ({"requests": {"memory": "64Mi"}}, "requests.memory 64Mi (at least 400Mi)"),
        ({"limits": {"memory": 1e8}}, "limits.memory 100000000.0 (at least 400Mi)"),
        ({"limits": {"memory": "3e2"}}, "limits.memory 3e2 (at least 400Mi)"),
        ({"limits": {"memory": "300Mi"}}, "limits.memory 300Mi (at least 400Mi)"),
        ({"limits": {"memory": "1E"}, "requests": {"cpu": ".09"}},
         "requests.cpu .09 (at least 100m)"),
        ({"limits": {"cpu": 0.1, "memory": "400Mi"}}, ""),
        ({"limits": {"cpu": "2"}, "requests": {"cpu": "10m"}}, ""),
        ({"limits": {"memory": "0.42G", "cpu": "100000u"}}, ""),
        ({"limits": {"cpu": "many"}}, ""), ({}, ""),
    ],
)  # fmt: skip
def test_too_little_for_torch_is_told_once_at_the_start(resources, said):
    world = with_resources(**resources)
    world.run().end(0, 1).run()
    told = [e for e in world.events if e.reason == "TooFewResources"]
    assert [f"has {said}: importing torch" in e.message for e in told] == [True] * bool(said)
    assert {e.type for e in told} <= {"Warning"}


def ready(world: World) -> tuple[str, str, str]:
    """Status and reason of the condition, and what kstatus makes of the job by it."""
    found = world.condition("Ready")
    return found["status"], found["reason"], kstatus(world.job)


def test_a_gang_is_ready_while_it_runs_and_once_it_has_succeeded():
    world = World(job_object())
    world.carry_out(world.plan().actions[0])
    assert ready(world) == ("False", "Pending", "InProgress"), "from the first write on"
    assert ready(world.settle()) == ("False", "Starting", "InProgress")
    assert ready(world.run()) == ("True", "Running", "Current")
    world.end(1, 137)
    assert ready(world) == ("False", "Starting", "InProgress")
    assert ready(world.run()) == ("True", "Running", "Current")
    assert ready(world.all_end(0).settle()) == ("True", "Succeeded", "Current")


def test_failure_for_good_is_failure_for_kstatus_too():
    world = running(restart={"maxRestarts": 0}).end(0, 1)
    assert (ready(world), world.stalled) == (("False", "Failed", "Failed"), "MaxRestartsExceeded")
