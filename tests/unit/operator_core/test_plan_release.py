"""Stories of gangs that the cluster refuses or has no room for: nobody is charged, all get on."""

from datetime import datetime, timedelta

import pytest

from ddpjob_operator.core.actions import ApiFeedback
from support.world import World, refusal, running, started


def unscheduled(world: World, replica: int) -> World:
    """Its pod is there, but no scheduler has found a node for it."""
    conditions = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}]
    world.pods[f"job-{replica}"]["status"] = {"phase": "Pending", "conditions": conditions}
    return world


@pytest.mark.fault("U5")
@pytest.mark.parametrize("code", [0, 401, 403, 409, 500, 503])
@pytest.mark.parametrize("what", ["pod", "service"])
def test_what_the_cluster_refuses_is_waited_for_and_charged_to_nobody(what, code):
    world, words = World(), "exceeded quota" if code == 403 else "words"
    if what == "pod":
        world.refuse = lambda action: refusal(code, words) if action.replica == 2 else None
    else:
        world.refuse_network = lambda _: refusal(code, words)
    world.settle()
    for _ in range(40):
        world.wait(300)
    assert world.phase in ("Pending", "Starting")
    restarts = world.status["restarts"]
    assert (world.counts, restarts["consecutive"]) == ((0, 0, 0), 0)
    assert restarts["released"] > 1
    told = [event.message for event in world.events if "next try in" in event.message]
    assert [words in message for message in told] == [True] * restarts["released"]
    world.refuse, world.refuse_network = (lambda _: None), (lambda _: None)
    world.wait(500).wait(500).run()
    assert (world.phase, world.status["restarts"]["released"]) == ("Running", 0)
    assert world.stalled == ""
    assert world.end(0, 1).phase == "Starting", "a later restart is not delayed"


@pytest.mark.fault("A5")
@pytest.mark.parametrize("code", [400, 422])
def test_an_invalid_pod_is_reported_and_made_after_an_edit(code):
    world = World()
    world.refuse = lambda _: refusal(code, 'unknown field "spec.contaners"')
    world.settle()
    assert (world.phase, world.pods) == ("Pending", {})
    assert world.status["reason"] == "PodRefused"
    assert "spec.contaners" in world.condition("Invalid")["message"]
    for _ in range(40):
        world.wait(300)
    assert (world.phase, world.counts[0]) == ("Pending", 0)
    world.patch(suspend=True)
    assert (world.phase, world.status["observedGeneration"]) == ("Suspended", 2)
    world.refuse = lambda _: None
    world.patch(template={"spec": {"containers": [{"name": "trainer", "image": "other"}]}})
    world.patch(suspend=False)
    assert world.phase == "Starting"
    assert world.condition("Invalid")["status"] == "False"
    assert world.run().phase == "Running"


@pytest.mark.parametrize("how", ["by an edit", "by itself"])
def test_a_corrected_pod_that_waits_for_quota_is_not_called_invalid(how):
    world = World()
    world.refuse = lambda _: refusal(422, "Invalid value")
    assert world.settle().status["reason"] == "PodRefused"
    world.refuse = lambda _: refusal(403, "exceeded quota")
    if how == "by an edit":
        world.patch(suspend=True).patch(suspend=False)
    else:
        world.wait(300).wait(300)
    assert world.status["reason"] == "QuotaExceeded"
    assert world.condition("Invalid")["status"] == "False"


def test_the_reason_is_that_of_the_present_state():
    world = World()
    world.refuse = lambda _: refusal(403, "exceeded quota")
    assert world.settle().status["reason"] == "QuotaExceeded"
    world.refuse = lambda _: None
    assert "reason" not in world.wait(9).run().status
    world.waiting(0, "ErrImagePull").wait(2)
    assert world.status["reason"] == "ImagePullBackOff"
    world.graceful = True
    world.run().wait(30).end(1, 137)
    assert (world.phase, world.status["reason"]) == ("Restarting", "SIGKILL")
    world.finish_deletions().run()
    world.patch(template={"spec": {"containers": [{"name": "trainer", "image": "other"}]}})
    assert (world.phase, world.status["reason"]) == ("Running", "TemplateChanged")
    world.end(1, 2)
    assert (world.phase, world.status["reason"]) == ("Failed", "PermanentFailure")
    done = running().patch(template={"spec": {"containers": [{"name": "trainer"}]}})
    done.end(0, 0).end(1, 0).end(2, 0)
    assert (done.phase, done.status.get("reason")) == ("Succeeded", None)


def placed(world: World, replica: int, at: datetime) -> World:
    """It gets its node, and its image is pulled."""
    world.waiting(replica, "ContainerCreating")
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at.isoformat()}
    world.pods[f"job-{replica}"]["status"]["conditions"] = [bound]
    return world.settle()


@pytest.mark.fault("U5")
@pytest.mark.parametrize("ahead", [0, 3600, -3600])
def test_who_got_a_node_late_has_the_whole_time_to_start_on_it(ahead):
    """Whatever the cluster's clock says, up to twice the time; a node that was slow is no fault."""
    world = started(startupDeadlineSeconds=60).run(0, 1).wait(55)
    placed(world, 2, world.now + timedelta(seconds=ahead)).wait(10)
    late = ahead < 0  # by that clock it had its node all the time
    assert (world.phase, world.status["attempt"]) == ("Starting", 2 if late else 1)
    world.wait(120)
    assert (world.loss["class"], world.counts[1]) == ("Startup", 1)


def test_a_pod_that_is_to_be_evicted_is_a_disruption_when_the_time_is_over():
    world = started(startupDeadlineSeconds=60).run(0, 1).waiting(2, "ContainerCreating")
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    world.pods["job-2"]["status"]["conditions"] = [evicted]
    world.wait(60)
    assert world.loss["reason"] == "PreemptionByScheduler"
    assert (world.status["attempt"], world.counts[1]) == (2, 0)


def test_pods_that_could_not_be_created_in_time_are_no_fault_of_the_user():
    """The API server was away, and nothing is known of why."""
    world = World()
    while "Starting" not in str(world.job.get("status")):
        world.carry_out(world.plan().actions[0])
    world.now = world.now.replace(hour=1)
    world.feedback = ApiFeedback(begun=1)
    world.settle()
    assert (world.phase, world.status["restarts"]["total"]) == ("Pending", 0)
    assert "never created" in world.condition("Stalled")["message"]


def test_a_release_does_not_hide_a_crash_loop():
    world = started(restart={"maxRestarts": 9, "backoff": {"maxSeconds": 16}}).run()
    for _ in range(5):
        world.end(0, 1).wait(20).run()
    assert world.status["restarts"]["consecutive"] == 5
    world.end(0, 1).wait(20)
    unscheduled(world.run(0, 1), 2).wait(600)
    assert world.status["restarts"]["released"] == 1
    world.wait(100).run()
    assert (world.phase, world.status["restarts"]["consecutive"]) == ("Running", 6)


def test_a_recovery_with_a_try_that_was_given_back_counts_from_the_failure():
    """It was taken for a first start, as long as the job was old."""
    world = running().wait(86400).end(1, 1)
    for replica in range(3):
        unscheduled(world, replica)
    world.wait(600)
    assert (world.phase, world.status["restarts"]["released"]) == ("Pending", 1)
    world.wait(world.pause()).run()
    took = world.measurements[-1]
    assert (world.phase, took.name) == ("Running", "recovery_seconds")
    assert 600 < took.value < 1800
    assert world.status["timings"]["lastRecoverySeconds"] == round(took.value, 3)


@pytest.mark.parametrize("placed", [(0, 1), ()])
def test_a_gang_that_never_finds_room_leaves_half_of_the_time_to_others(placed):
    """Whatever its age; where it takes no place from anybody it asks again soon."""
    world = started()
    held = rested = 0.0
    for number in range(60):
        world.run(*placed) if placed else None
        began = world.now
        for replica in set(range(3)) - set(placed):
            unscheduled(world, replica)
        world.wait(600)
        assert (world.phase, world.status["reason"]) == ("Pending", "Unschedulable")
        if number >= 30:
            held += (world.now - began).total_seconds()
            rested += world.pause()
        world.wait(world.pause())
    assert rested >= 0.8 * held if placed else rested <= 0.2 * held
