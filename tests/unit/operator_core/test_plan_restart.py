"""Stories of a gang that loses members, told to the pure planner."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.status import Progress
from ddpjob_operator.core.plan import plan
from support.world import World, job_object


def started(**spec: object) -> World:
    return World(job_object(**spec)).settle()


def running(**spec: object) -> World:
    world = started(**spec).run()
    world.log.clear()
    return world


def test_intent_is_alone_in_its_plan():
    world = running().end(1, 1, settle=False)
    (write,) = world.plan().actions
    assert isinstance(write, act.WriteStatus)
    assert (write.status["phase"], write.status["attempt"]) == ("Restarting", 2)
    assert write.status["membersSince"] == 2


@pytest.mark.parametrize("replica", range(3))
@pytest.mark.parametrize("how", ["killed", "vanished", "deleted"])
def test_any_member_lost_in_any_way_is_one_restart(replica: int, how: str):
    world = running()
    if how == "killed":
        world.end(replica, 137)
    elif how == "vanished":
        world.vanish(replica)
    else:
        world.terminate(replica).end(replica, 143)
    world.run()
    assert world.status["attempt"] == 2
    assert world.status["restarts"]["total"] == 1
    assert world.status["restarts"]["charged"] == (1 if how == "killed" else 0)
    assert world.status["lastFailure"]["replica"] == replica
    assert world.attempts() == {2}
    assert world.phase == "Running"


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
    assert world.status["lastFailure"]["exception"] == "ValueError: bad shape"


def test_members_killed_together_count_once():
    world = running()
    world.end(0, 137, settle=False).end(2, 137, settle=False).settle().run()
    assert world.status["attempt"] == 2
    assert world.status["restarts"] == {
        "total": 1, "charged": 1, "disruptions": 0, "consecutive": 1,
        "released": 0, "inPlace": 0, "round": 0, "snapshotStep": 0,
    }  # fmt: skip


def test_who_was_killed_explains_the_exit_codes_of_the_others():
    world = running().end(0, 1, settle=False)
    world.now += timedelta(seconds=1)
    world.end(2, 137)
    failure = world.status["lastFailure"]
    assert (failure["replica"], failure["class"], failure["reason"]) == (2, "Killed", "SIGKILL")
    assert world.status["restarts"]["charged"] == 1


def test_no_pod_is_created_while_an_old_one_is_still_there():
    world = running()
    world.graceful = True
    world.end(1, 1)
    assert world.phase == "Restarting"
    assert world.attempts() == {1}
    assert not [line for line in world.log if line.startswith("create")]
    assert all(pod["metadata"]["deletionGracePeriodSeconds"] == 2 for pod in world.pods.values())
    world.finish_deletions()
    assert world.attempts() == {2}


def test_a_long_grace_under_way_is_cut_short_once_a_member_is_dead():
    world = running()
    world.graceful = True
    world.terminate(0, grace=600)
    assert world.phase == "Running"  # it may still save a snapshot
    world.end(1, 1)
    assert world.pods["job-0"]["metadata"]["deletionGracePeriodSeconds"] == 2
    assert world.plan().actions == ()


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_max_restarts_is_exact(limit: int):
    world = running(restart={"maxRestarts": limit})
    for _ in range(limit):
        assert world.end(1, 1).wait(300).run().phase == "Running"
    world.end(1, 1)
    assert world.phase == "Failed"
    assert world.status["attempt"] == limit + 1
    failure = world.status["lastFailure"]
    assert (failure["class"], failure["exitCode"], failure["node"]) == ("User", 1, "node2")
    assert world.condition("Failed")["reason"] == "MaxRestartsExceeded"
    assert f"maxRestarts {limit}" in world.condition("Failed")["message"]


def test_disruptions_are_not_charged_but_bounded():
    world = running(restart={"maxRestarts": 0, "maxDisruptions": 1})
    assert world.vanish(0).run().phase == "Running"
    assert world.vanish(0).phase == "Failed"
    assert world.condition("Failed")["reason"] == "MaxDisruptionsExceeded"


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


def test_a_rule_that_does_not_match_changes_nothing():
    world = running(restart={"rules": [{"exitCodes": [9], "action": "Fail"}]})
    assert world.end(0, 1).phase == "Starting"


def test_a_long_run_forgets_the_backoff():
    world = running(restart={"maxRestarts": 9})
    world.end(0, 1).run().wait(301)
    assert world.end(0, 1).phase == "Starting"  # no wait, though the second in a row


@pytest.mark.parametrize("code", [2, 64, 78, 126, 127, 70])
def test_what_cannot_be_cured_fails_at_once(code: int):
    world = running().end(2, code)
    assert world.phase == "Failed"
    assert world.status["attempt"] == 1
    assert world.condition("Failed")["reason"] == "PermanentFailure"


def test_collateral_waits_for_the_cause():
    world = running().end(0, 75)
    assert world.phase == "Running"
    world.wait(4)  # a kubelet under load may be that much slower
    assert world.phase == "Running"
    world.end(1, 137)
    assert world.status["lastFailure"]["replica"] == 1


def test_collateral_alone_is_infrastructure():
    world = running().end(0, 75).wait(5)
    assert world.phase == "Starting"
    assert world.status["lastFailure"]["class"] == "Infrastructure"


def test_once_all_have_ended_no_cause_is_waited_for():
    world = running()
    for replica in range(3):
        world.end(replica, 75, settle=False)
    assert world.settle().phase == "Starting"


def test_collateral_of_a_pod_that_is_leaving_is_a_disruption():
    world = running().terminate(2).end(0, 75)
    assert world.status["lastFailure"]["replica"] == 2
    assert world.status["lastFailure"]["class"] == "Disruption"
    assert world.status["lastFailure"]["node"] == "node1"


def test_the_kubelets_clock_cannot_hold_up_a_decision():
    world = running()
    world.now += timedelta(hours=1)
    world.end(0, 75, settle=False)
    world.now -= timedelta(hours=1)
    assert world.settle().phase == "Starting"


@pytest.mark.fault("U4")
@pytest.mark.parametrize("hours", [1, -1])
def test_the_cause_is_waited_for_by_our_own_clock(hours: int):
    """Else a kubelet whose clock is off makes what the user did free."""
    world = running()
    world.now += timedelta(hours=hours)
    world.end(0, 75, settle=False)
    world.now -= timedelta(hours=hours)
    pods = [observe.pod(pod) for pod in world.pods.values()]
    pods[0] = replace(pods[0], told_at=world.now)

    def phase(after: float) -> str:
        now = world.now + timedelta(seconds=after)
        planned = plan(observe.job(world.job), pods, world.feedback, now).actions
        written = [a.status["phase"] for a in planned if isinstance(a, act.WriteStatus)]
        return str(written[0] if written else world.phase)

    assert [phase(0), phase(4.9), phase(5)] == ["Running", "Running", "Restarting"]


@pytest.mark.parametrize(
    ("action", "phase", "charged"),
    [("Fail", "Failed", 0), ("RestartFree", "Starting", 0), ("Restart", "Starting", 1)],
)
def test_first_matching_rule_wins(action: str, phase: str, charged: int):
    rules = [{"exitCodes": [3], "action": action}, {"exitCodes": [3], "action": "Fail"}]
    world = running(restart={"rules": rules}).end(0, 3)
    assert (world.phase, world.status["restarts"]["charged"]) == (phase, charged)


@pytest.mark.parametrize("reason", ["OOMKilled", "OOM"])
def test_rules_match_reason_and_class(reason: str):
    world = running(restart={"rules": [{"reasons": [reason], "action": "Fail"}]})
    assert world.end(0, 137, reason="OOMKilled").phase == "Failed"


def test_pods_of_others_are_not_seen():
    world = started().restart_operator()
    world.pods["job-0"]["metadata"]["ownerReferences"][0]["uid"] = "somebody else's"
    while not isinstance((todo := world.plan().actions)[0], act.CreatePod):
        world.carry_out(todo[0])
    assert 0 in {a.replica for a in world.plan().actions if isinstance(a, act.CreatePod)}


def test_recovery_time_and_metrics_are_told_with_the_transition():
    world = running()
    world.measurements.clear()
    world.end(1, 137)
    world.now += timedelta(seconds=3)
    world.run()
    assert world.status["timings"]["lastRecoverySeconds"] == 3.0
    names = [m.name for m in world.measurements]
    assert names == ["detection_seconds", "restarts_total", "recovery_seconds"]
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
def test_an_outage_counts_from_the_last_step_that_was_heard_of(
    code: int | None, heard: int | None, seconds: float
):
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
    assert (world.measurements[-1].name, world.measurements[-1].value) == (
        "recovery_seconds",
        seconds,
    )


def test_a_loss_is_one_of_this_start_though_another_clock_has_stored_the_start_as_later():
    world = running().restart_operator()
    world.now -= timedelta(hours=1)  # the clock of the machine on which the next operator runs
    assert world.end(1, 1).status["timings"]["startedAt"] > world.now.isoformat()
    world.now += timedelta(seconds=3)
    assert world.run().status["timings"]["lastRecoverySeconds"] == 3.0


@pytest.mark.fault("O6")
@pytest.mark.parametrize("seen", [False, True])
def test_a_success_of_which_nothing_is_left_is_run_again_free_of_charge(seen: bool):
    """docs/guides/restarts.md tells of this limit; what an operator has seen before counts."""
    world = running()
    if seen:
        world.end(0, 0).wait(2).end(1, 0).wait(2)
    for replica in (2,) if seen else range(3):
        world.end(replica, 0, settle=False)
    world.pods = {"job-2": world.pods["job-2"]} if seen else {}
    world.restart_operator().settle()
    assert (world.phase, world.status["attempt"]) == (("Succeeded", 1) if seen else ("Starting", 2))
    assert world.status["restarts"]["charged"] == 0
    assert world.status["restarts"]["disruptions"] == (not seen)


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
    world.settle()
    assert world.status["lastFailure"]["reason"] == "DeletionByTaintManager"
    restarts = world.status["restarts"]
    assert (restarts["charged"], restarts["disruptions"], world.status["attempt"]) == (0, 2, 3)


@pytest.mark.fault("U8")
@pytest.mark.parametrize(("kilobytes", "most"), [(1, 500), (10, 110), (120, 9)])
def test_a_large_gang_of_a_large_template_is_rendered_a_few_pods_at_a_time(
    kilobytes: int, most: int
):
    """All at once they would be a gigabyte, and hold up all other jobs for a second."""
    trainer = {"name": "trainer", "args": ["x" * 1000] * kilobytes}
    world = World(job_object(replicas=700, template={"spec": {"containers": [trainer]}}))
    while not (made := [a for a in world.plan().actions if isinstance(a, act.CreatePod)]):
        for action in world.plan().actions:
            world.carry_out(action)
    assert most / 2 < len(made) <= most


def test_failures_are_bounded():
    world = running(restart={"maxRestarts": 99})
    for _ in range(12):
        world.end(0, 1).wait(301).run()
    assert len(world.status["failures"]) == 10
    assert world.status["lastFailure"]["attempt"] == 12


def test_a_delay_that_another_clock_has_stored_in_the_future_stays_a_delay():
    world = running(restart={"backoff": {"maxSeconds": 1}}).end(0, 1).run().end(0, 1)
    assert (world.phase, world.wait(0.5).phase) == ("Restarting", "Restarting")
    world.restart_operator()
    world.now -= timedelta(hours=1)  # the clock of the machine on which the next operator runs
    world.feedback = replace(world.feedback, seen_since=world.now)
    assert world.settle().plan().requeue_after == 1.0
    assert world.wait(1).phase == "Starting"
