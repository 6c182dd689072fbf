"""Stories of a gang that loses members, told to the pure planner."""

from dataclasses import replace
from datetime import timedelta

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core import actions as act
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from ddpjob_operator.core.objects.status import Progress
from support.world import JOB_UID, World, job_object, running, started


def test_intent_is_alone_in_its_plan():
    world = running().end(1, 1, settle=False)
    (write,) = world.plan().actions
    assert isinstance(write, act.WriteStatus)
    assert (write.status["phase"], write.status["attempt"]) == ("Restarting", 2)
    assert write.status["membersSince"] == 2


@pytest.mark.fault("U18")
def test_the_secret_is_made_before_the_pods_and_when_it_may_be_gone():
    world = started(startupDeadlineSeconds=60, restart={"maxRestarts": 9}).run()
    calls = [(call.verb, call.plural) for call in world.wire.calls]
    assert calls.index(("create", "secrets")) < calls.index(("create", "pods"))
    body, *_ = render.network(observe.job(world.job), spec.read(world.job["spec"]))
    name = body["metadata"]["name"]
    owner = body["metadata"]["ownerReferences"][0]["uid"]
    assert (name, owner) == ("job-uid-of-j", JOB_UID)
    ref = {"name": contract.TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}
    assert all(ref in pod["spec"]["containers"][0]["env"] for pod in world.pods.values())
    world.end(1, 1).run()
    assert (world.tries("secrets"), world.status["attempt"]) == (1, 2)
    world.restart_operator().end(1, 1).wait(301).run()
    assert (world.tries("secrets"), world.status["attempt"]) == (2, 3), "this process made none"
    world.end(1, 1).wait(301).all_wait("CreateContainerConfigError").wait(60).wait(301)
    assert (world.loss["class"], world.status["attempt"]) == ("Startup", 5)
    assert world.tries("secrets") == 3


def test_the_exception_is_in_the_column_the_event_and_the_condition():
    report = '{"version":1,"kind":"exception","code":1,"exception":"ValueError: bad shape"}'
    world = running(restart={"maxRestarts": 1}).end(1, 1, message=report)
    quoted = "replica 1 (rank 1) on node2: ValueError: bad shape, exit code 1 [User]"
    assert quoted in world.condition("Running")["message"]
    assert any(quoted in event.message for event in world.events)
    world.run().end(1, 1, message=report)
    assert quoted in world.condition("Failed")["message"]
    assert world.status["reason"] == "MaxRestartsExceeded"
    assert world.status["message"] == "ValueError: bad shape"
    assert world.loss["exception"] == "ValueError: bad shape"


def test_no_pod_is_created_while_an_old_one_is_still_there():
    world = running(graceful=True).terminate(0, grace=600)
    assert world.phase == "Running"  # it may still save a snapshot
    world.end(1, 1)
    assert (world.phase, world.attempts()) == ("Restarting", {1})
    assert not [line for line in world.log if line.startswith("create")]
    graces = [pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.pods.values()]
    assert graces == [2, 0, 2], "where nothing runs there is nothing to wait for"
    assert world.plan().actions == ()
    world.finish_deletions()
    assert world.attempts() == {2}


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_max_restarts_is_exact(limit):
    world = running(restart={"maxRestarts": limit})
    for _ in range(limit):
        assert world.end(1, 1).wait(300).run().phase == "Running"
    world.end(1, 1)
    assert (world.phase, world.status["attempt"]) == ("Failed", limit + 1)
    assert (world.loss["class"], world.loss["exitCode"], world.loss["node"]) == ("User", 1, "node2")
    assert world.status["reason"] == "MaxRestartsExceeded"
    assert f"maxRestarts {limit}" in world.condition("Failed")["message"]


def test_backoff_first_at_once_then_doubling_and_bounded():
    world = running(restart={"maxRestarts": 9, "backoff": {"initialSeconds": 2, "maxSeconds": 5}})
    for delay in [0, 2, 4, 5, 5]:
        world.end(0, 1, message='{"version": 1, "kind": "exit", "step": 9}')
        if delay:
            assert world.phase == "Restarting"
            assert world.plan().requeue_after == delay or delay > 2
            world.wait(delay - 0.5)
            assert world.attempts() == set()
            world.wait(0.5)
        assert world.phase == "Starting"
        world.run()
    assert world.wait(6).end(0, 1).phase == "Starting", "a long run forgets it"


@pytest.mark.parametrize("code", [2, 64, 78, 126, 127, 70])
def test_what_cannot_be_cured_fails_at_once(code):
    world = running().end(2, code)
    assert (world.phase, world.status["attempt"]) == ("Failed", 1)
    assert world.status["reason"] == "PermanentFailure"


def test_collateral_waits_for_its_cause_and_is_infrastructure_without_one():
    assert running().end(0, 75).phase == "Running"
    world = running().end(0, 75).wait(4)  # a kubelet under load may be that much slower
    assert (world.phase, world.end(1, 137).loss["replica"]) == ("Running", 1)
    world = running().end(0, 75).wait(5)
    assert (world.phase, world.loss["class"]) == ("Starting", "Infrastructure")
    assert running().all_end(75).settle().phase == "Starting", "all have ended: no cause can show"
    for code in (75, 1):  # 1: of a script that knows no 75, "connection closed by peer"
        loss = running().terminate(2).end(0, code).loss
        assert (loss["replica"], loss["class"], loss["node"]) == (2, "Disruption", "node1")


@pytest.mark.fault("U4")
@pytest.mark.parametrize("hours", [1, -1])
def test_the_cause_is_waited_for_by_our_own_clock(hours):
    """Else a kubelet whose clock is off makes what the user did free."""
    world = running()
    world.now += timedelta(hours=hours)
    world.end(0, 75, settle=False)
    world.now -= timedelta(hours=hours)
    assert (world.settle().phase, world.wait(4.9).phase) == ("Running", "Running")
    assert (world.wait(0.1).phase, world.loss["class"]) == ("Starting", "Infrastructure")


@pytest.mark.parametrize(
    ("match", "action", "phase", "charged"),
    [
        ({"exitCodes": [137]}, "Fail", "Failed", 0),
        ({"exitCodes": [137]}, "RestartFree", "Starting", 0),
        ({"exitCodes": [137]}, "Restart", "Starting", 1),
        ({"exitCodes": [9]}, "RestartFree", "Failed", 0),  # it does not match, the next one does
        ({"reasons": ["OOMKilled"]}, "Restart", "Starting", 1),
        ({"reasons": ["OOM"]}, "Restart", "Starting", 1),
    ],
)
def test_the_first_rule_that_matches_wins(match, action, phase, charged):
    rules = [{**match, "action": action}, {"exitCodes": [137], "action": "Fail"}]
    world = running(restart={"rules": rules}).end(0, 137, reason="OOMKilled")
    assert (world.phase, world.counts[1]) == (phase, charged)


def test_pods_of_others_are_not_seen():
    world = started().restart_operator()
    world.pods["job-0"]["metadata"]["ownerReferences"][0]["uid"] = "somebody else's"
    todo = world.until(act.CreatePod).plan().actions
    assert 0 in {action.replica for action in todo if isinstance(action, act.CreatePod)}


def test_recovery_time_and_metrics_are_told_with_the_transition():
    report = '{"version":1,"kind":"signal","step":60,"snapshotStep":50}'
    world = running().end(1, 137, message=report)
    world.now += timedelta(seconds=3)
    assert world.run().status["timings"]["lastRecoverySeconds"] == 3.0
    measured = {"detection_seconds": 0, "lost_steps": 10, "restarts_total": 1}
    found = {one.name: one.value for one in world.measurements}
    assert found == {**measured, "recovery_seconds": 3}
    assert [e.reason for e in world.events][-2:] == ["Restarting", "Running"]


@pytest.mark.fault("N6")
@pytest.mark.parametrize(
    ("code", "heard", "seconds"),
    [
        (None, 90, 93.0),  # nobody told of its end
        (76, 300, 303.0),
        (137, 90, 3.0),
        (None, None, 3.0),  # tells no steps
        (None, -10, 3.0),  # of an attempt that began since
    ],
)
def test_an_outage_counts_from_the_last_step_that_was_heard_of(code, heard, seconds):
    world = running().wait(60).end(0, 1).run().wait(600)
    progress = Progress(step=7 if heard else None, updated_at=world.now)
    if heard == -10:
        progress = replace(progress, updated_at=world.now - timedelta(seconds=700))
    world.feedback = replace(world.feedback, progress=progress)
    world.wait(abs(heard or 90))
    world.vanish(1) if code is None else world.end(1, code)
    assert world.status["attempt"] == 3
    world.now += timedelta(seconds=3)
    assert world.run().status["timings"]["lastRecoverySeconds"] == seconds
    last = world.measurements[-1]
    assert (last.name, last.value) == ("recovery_seconds", seconds)


def test_a_loss_belongs_to_this_start_under_a_slower_clock():
    world = running().restart_operator()
    world.now -= timedelta(hours=1)  # the clock of the machine on which the next operator runs
    assert world.end(1, 1).status["timings"]["startedAt"] > world.now.isoformat()
    world.now += timedelta(seconds=3)
    assert world.run().status["timings"]["lastRecoverySeconds"] == 3.0


@pytest.mark.fault("O6")
@pytest.mark.parametrize("seen", [False, True])
def test_a_success_of_which_nothing_is_left_is_run_again_free_of_charge(seen):
    """docs/guides/restarts.md tells of this limit; what an operator has seen before counts."""
    world = running()
    if seen:
        world.end(0, 0).wait(2).end(1, 0).wait(2)
    world.all_end(0)
    world.pods = {"job-2": world.pods["job-2"]} if seen else {}
    world.restart_operator().settle()
    assert (world.phase, world.status["attempt"]) == (("Succeeded", 1) if seen else ("Starting", 2))
    assert world.counts[1:] == (0, not seen)


@pytest.mark.fault("N6")
def test_a_late_deletion_of_the_taint_manager_costs_one_more_disruption():
    """It deletes by name, and so meets the pod that has replaced the one it was meant for."""
    world = running().vanish(1).run()
    late = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    world.pods["job-1"]["status"]["conditions"] = [late]
    world._mark(world.pods["job-1"], 30)
    world.pods["job-1"]["status"]["phase"] = "Failed"
    ended = {"terminated": {"exitCode": 143, "reason": "Error"}}
    world.pods["job-1"]["status"]["containerStatuses"][0]["state"] = ended
    assert world.settle().loss["reason"] == "DeletionByTaintManager"
    assert (world.counts, world.status["attempt"]) == ((2, 0, 2), 3)


@pytest.mark.fault("U8")
@pytest.mark.parametrize(("kilobytes", "most"), [(1, 500), (10, 110), (120, 9)])
def test_a_large_gang_of_a_large_template_is_rendered_a_few_pods_at_a_time(kilobytes, most):
    """All at once they would be a gigabyte, and hold up all other jobs for a second."""
    trainer = {"name": "trainer", "args": ["x" * 1000] * kilobytes}
    world = World(job_object(replicas=700, template={"spec": {"containers": [trainer]}}))
    while not (made := [a for a in world.plan().actions if isinstance(a, act.CreatePod)]):
        world.carry_out(*world.plan().actions)
    assert most / 2 < len(made) <= most


def test_failures_are_bounded():
    world = running(restart={"maxRestarts": 99})
    for _ in range(12):
        world.end(0, 1).wait(301).run()
    assert len(world.status["failures"]) == 10
    assert world.loss["attempt"] == 12


def test_a_delay_that_another_clock_has_stored_in_the_future_stays_a_delay():
    world = running(restart={"backoff": {"maxSeconds": 1}}).end(0, 1).run().end(0, 1)
    assert (world.phase, world.wait(0.5).phase) == ("Restarting", "Restarting")
    world.restart_operator()
    world.now -= timedelta(hours=1)  # the clock of the machine on which the next operator runs
    world.sees_from_now()
    assert world.settle().plan().requeue_after == 1.0
    assert world.wait(1).phase == "Starting"


@pytest.mark.fault("N2")
def test_members_killed_together_count_once():
    world = running().end(0, 137, settle=False).end(2, 137, settle=False).settle().run()
    assert world.status["attempt"] == 2
    assert world.status["restarts"] == {
        "total": 1, "charged": 1, "disruptions": 0, "consecutive": 1,
        "released": 0, "replaced": 0, "inPlace": 0, "round": 0, "snapshotStep": 0,
    }  # fmt: skip
