"""Stories of gangs with pods that stand by: seats 3 and more of a gang of 3 replicas."""

import json
from dataclasses import replace
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core import actions as act
from support.world import Machines, World, env_of, intent, refusal, rendered, running

QUOTA = "pods is forbidden: exceeded quota: q"


def standing_by(*, seats: int = 4, graceful: bool = False, **spec: Any) -> World:
    """A gang that runs and holds, with a pod that stands by."""
    world = running(graceful=graceful, standby=seats - 3, **spec)
    world.run(*range(seats)).poll(holds=True).wait(2)
    assert (world.status["holds"], world.status["ready"]) == (True, "3/3")
    world.log.clear()
    world.events.clear()
    return world


def created(world: World) -> list[str]:
    return [line.removeprefix("create ") for line in world.log if line.startswith("create")]


def last_words(replica: int) -> str:
    return json.dumps({"version": 1, "kind": "success", "round": 1, "replica": replica})


# --- A whole start ------------------------------------------------------------------------


def test_pods_that_stand_by_are_made_once_the_gang_runs():
    world = World()
    world.job["spec"]["standby"] = 2
    world.settle()
    assert (world.phase, sorted(world.pods)) == ("Starting", ["job-0", "job-1", "job-2"])
    world.run()
    assert (world.phase, sorted(world.pods)[3:]) == ("Running", ["job-3", "job-4"])
    assert (world.status["ready"], world.status["attempt"]) == ("3/3", 1)
    env = env_of(world.pods["job-4"])
    names = (contract.REPLICA, contract.REPLICAS, contract.STANDBY, contract.REPLACEMENT)
    assert [env[name] for name in names] == ["4", "3", "2", "1"]
    assert "RANK" not in env
    assert contract.REPLACEMENT not in env_of(world.pods["job-2"])


def test_without_standby_nothing_is_different():
    env = env_of(running().pods["job-2"])
    assert not {contract.STANDBY, contract.REPLACEMENT} & env.keys()


def test_they_have_a_priority_of_their_own():
    template = {"spec": {"priorityClassName": "high", "containers": [{"name": "trainer"}]}}
    spec = {"standby": 1, "standbyPriorityClassName": "low", "template": template}
    classes = [rendered(replica=n, **spec)["spec"]["priorityClassName"] for n in range(4)]
    assert classes == ["high", "high", "high", "low"]
    del spec["standbyPriorityClassName"]
    assert rendered(replica=3, **spec)["spec"]["priorityClassName"] == "high"


def test_on_the_hosts_network_none_can_stand_by():
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "trainer"}]}}
    world = World()
    world.job["spec"] |= {"standby": 1, "template": template}
    assert "spec.standby" in world.settle().condition("Invalid")["message"]
    assert world.pods == {}


@pytest.mark.parametrize("words", [QUOTA, "no PriorityClass with name low was found"])
@pytest.mark.fault("N26")
def test_one_that_is_refused_is_tried_again_and_the_gang_trains_on(words):
    world = running()
    world.patch(suspend=True)
    world.job["spec"]["standby"] = 1
    world.refuse = lambda todo: refusal(403, words) if todo.replica == 3 else None
    world.patch(suspend=False).run().wait(900)
    assert (world.phase, intent(world), len(world.pods)) == ("Running", (2, 2, ""), 3)
    assert (world.stalled, world.counts) == ("Reason", (0, 0, 0))
    world.refuse = lambda _: None
    assert created(world.wait(300))[-1:] == ["job-3 2"]
    assert (world.phase, world.stalled) == ("Running", "")


def test_one_that_is_refused_holds_up_no_other():
    world = World()
    world.job["spec"]["standby"] = 1
    world.refuse = lambda todo: refusal(403, "no such class") if todo.replica == 3 else None
    world.settle().run().poll(holds=True).wait(1500).vanish(1)
    assert (created(world)[-1], world.phase) == ("job-1 2", "Starting")


def test_a_gang_refused_as_invalid_is_valid_without_standby_pods():
    world = World()
    world.job["spec"]["standby"] = 1
    world.refuse = lambda _: refusal(422)
    assert world.settle().condition("Invalid")["status"] == "True"
    world.refuse = lambda todo: refusal(403, QUOTA) if todo.replica == 3 else None
    assert world.wait(60).run().condition("Invalid")["status"] == "False"


@pytest.mark.fault("N26")
def test_one_that_finds_no_room_is_no_trouble_of_the_gang():
    world = running(standby=1).waiting(3, "ImagePullBackOff").wait(3600)
    assert (world.phase, world.stalled, intent(world)) == ("Running", "", (1, 1, ""))


@pytest.mark.fault("O7")
def test_another_operator_makes_an_unseen_pod_in_a_new_attempt():
    """A seat and an attempt name one pod ever (rule O5)."""
    world = running(standby=1)
    del world.pods["job-3"]
    world.restart_operator().wait(60)
    assert (world.phase, len(world.pods)) == ("Running", 3), "it is not known that they hold"
    since = world.status["timings"]["runningAt"]
    world.measurements.clear()
    world.poll(holds=True).wait(2)
    assert (world.phase, intent(world), world.counts) == ("Running", (2, 1, "3:2"), (0, 0, 0))
    assert (created(world)[-1], world.status["timings"]["runningAt"]) == ("job-3 2", since)
    assert world.measurements == []


# --- A loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "vanished"])
@pytest.mark.parametrize("seat", [1, 3])
@pytest.mark.fault("N25")
def test_a_lost_pod_is_made_again_while_the_others_train(seat, how):
    world = standing_by()
    world.end(seat, 137) if how == "killed" else world.vanish(seat)
    assert (intent(world), world.phase) == ((2, 1, f"{seat}:2"), "Running")
    assert created(world) == [f"job-{seat} 2"]
    assert world.counts == ((1, 1, 0) if how == "killed" else (1, 0, 1))
    assert env_of(world.pods[f"job-{seat}"])[contract.REPLACEMENT] == "1"
    assert world.status["ready"] == "3/3"
    world.wait(3600)
    assert (intent(world), world.phase, world.stalled) == ((2, 1, f"{seat}:2"), "Running", "")


def test_the_hubs_pod_is_waited_for():
    world = standing_by().end(0, 137)
    assert (intent(world), world.phase) == ((2, 1, "0:2"), "Starting")
    assert world.run(0).phase == "Running"
    assert intent(standing_by().end(0, 137).wait(301)) == (3, 3, "")


@pytest.mark.fault("N25")
def test_more_lost_pods_than_stand_by_are_waited_for():
    world = standing_by(graceful=True).terminate(1).end(2, 137).finish_deletions()
    assert (intent(world), world.phase) == ((2, 1, "1:2,2:2"), "Starting")
    assert world.run(2).phase == "Running"
    world = standing_by().end(1, 137, settle=False).end(2, 137).wait(301)
    assert intent(world) == (3, 3, ""), "none came"


def test_a_new_pod_that_is_refused_is_tried_again_while_the_others_train():
    world = standing_by()
    world.refuse = lambda _: refusal(403, QUOTA)
    world.end(1, 137).wait(1800)
    assert (intent(world), world.phase, len(world.pods)) == ((2, 1, "1:2"), "Running", 3)
    assert (world.stalled, world.counts) == ("Reason", (1, 1, 0))
    # The next one is waited for; what was never made is no other loss.
    world.end(3, 137)
    assert (intent(world), world.phase, world.counts) == ((3, 1, "1:3,3:3"), "Starting", (2, 2, 0))
    world.refuse = lambda _: None
    assert world.wait(60).run(1).phase == "Running"
    assert world.attempts() == {1, 3}


def test_an_old_pod_that_stays_ends_no_gang_that_runs():
    """As one whose volumes are not unmounted: the new pod waits for it, the others do not."""
    world = standing_by(graceful=True).end(1, 137)
    assert (world.phase, world.attempts()) == ("Restarting", {1})
    assert (world.wait(299).phase, world.stalled) == ("Restarting", "WaitingForDeletion")
    assert "then all restart" not in world.condition("Stalled")["message"]
    assert (world.wait(1).phase, intent(world)) == ("Running", (2, 1, "1:2"))
    assert (world.wait(1800).phase, world.stalled) == ("Running", "WaitingForDeletion")
    assert world.status["attempt"] == 2
    world.finish_deletions()
    assert (world.phase, intent(world), world.counts) == ("Running", (3, 1, "1:3"), (1, 1, 0))
    assert world.attempts() == {1, 3}


def test_a_loss_in_a_later_attempt_is_a_new_incident():
    world = standing_by(graceful=True)
    world.refuse = lambda _: refusal(403, QUOTA)
    world.end(1, 137).finish_deletions().wait(400)  # seat 3 serves, and no new pod may be made
    counts = world.counts
    world.restart_operator().refuse = lambda _: None
    while world.status["attempt"] == 2:
        world.carry_out(*world.plan().actions)
    world.end(2, 137)
    assert world.counts == tuple(more + one for more, one in zip(counts, (1, 1, 0), strict=True))


def test_a_creation_without_an_answer_takes_another_attempt():
    world = standing_by()
    world.refuse = lambda _: refusal(500)
    world.end(1, 137, settle=False)
    todo = world.until(act.CreatePod).plan().actions
    world.carry_out(todo[0])
    world.feedback = replace(world.feedback, confirmed=None)
    world.refuse = lambda _: None
    world.wait(10)
    assert (intent(world), world.phase, world.counts) == ((3, 1, "1:3"), "Running", (1, 1, 0))
    assert created(world) == ["job-1 3"]


def test_a_vanished_one_needs_a_read_of_its_own():
    """The read before it was made does not know it."""
    world = standing_by()
    read = world.feedback.confirmed
    assert 3 not in read.replicas
    world.feedback = replace(world.feedback, confirmed=replace(read, running=True))
    del world.pods["job-3"]
    assert any(isinstance(action, act.ConfirmGone) for action in world.plan().actions)


def test_programs_that_do_not_hold_restart_whole():
    world = running(standby=1).run(3).end(1, 137)
    assert (intent(world), world.phase) == ((2, 2, ""), "Starting")
    assert len(world.pods) == 3
    assert len(world.run().pods) == 4


def test_when_as_many_have_ended_as_train_no_other_cause_is_waited_for():
    world = standing_by(restart={"maxRestarts": 1}, machines=Machines())
    world.pods["job-3"]["spec"]["nodeName"] = "node3"
    world.job["status"]["restarts"]["charged"] = 1
    for seat in (0, 2):
        world.end(seat, 75, settle=False)
    assert world.end(1, 137).phase == "Failed"


# --- Who serves ---------------------------------------------------------------------------


def test_the_status_shows_who_serves_until_all_restart():
    world = standing_by().end(1, 137).poll(holds=True, serving="1:3", round=1).wait(2)
    assert world.status["serving"] == "1:3"
    (told,) = (event.message for event in world.events if event.reason == "TookOver")
    assert told == "standby pods: job-3 serves replica 1"
    again = len(world.events)
    world.poll(holds=True, serving="1:3", round=2).wait(2)
    assert "TookOver" not in [event.reason for event in world.events[again:]]
    assert "serving" not in world.vanish(0).status
    assert world.status["membersSince"] == 1
    assert "serving" not in standing_by().poll(holds=True, serving="x").wait(2).status
    world = standing_by().poll(holds=True, serving="1:3").wait(2).patch(suspend=True)
    assert "serving" not in world.status


def test_a_round_names_the_pod_that_served_where_that_is_known():
    crash = {"round": 1, "replica": 1, "code": 1}
    lost = {"round": 0, "replica": 1, "kind": "lost"}
    world = standing_by().end(1, 137).run(1).poll(lost, holds=True, serving="1:3").wait(2)
    world.poll(lost, crash, holds=True, serving="1:3").wait(2)
    assert (world.loss["replica"], world.loss["pod"], world.loss["inPlace"]) == (1, "job-3", True)
    world.poll(lost, crash, {**crash, "round": 2}, holds=True, serving="1:1").wait(2)
    assert (world.loss["round"], world.loss.get("pod")) == (2, None)


@pytest.mark.parametrize(("gone", "in_place"), [(True, 0), (False, 1)])
def test_a_round_ended_by_a_lost_link_counts_with_the_serving_pod(gone, in_place):
    lost = {"round": 0, "replica": 1, "kind": "lost"}
    world = standing_by().end(1, 137).poll(lost, holds=True, serving="1:3").wait(2)
    if gone:
        world.vanish(3).wait(2).run(1, 3)
        world.status["serving"] = "1:3"  # as the newcomer has the place again
    world.poll(lost, {**lost, "round": 1}, holds=True, serving="1:3").wait(2)
    restarts = world.status["restarts"]
    assert (restarts["inPlace"], restarts["round"]) == (in_place, 2)


@pytest.mark.parametrize("seen_first", [True, False])
def test_a_round_with_a_takeover_counts_with_the_lost_pod(seen_first):
    lost = {"round": 0, "replica": 1, "kind": "lost"}
    world = standing_by()
    if seen_first:
        world.end(1, 137)
    world.poll(lost, holds=True, serving="1:3").wait(2)
    if not seen_first:
        world.end(1, 137)
    assert (world.status["restarts"]["inPlace"], world.status["restarts"]["round"]) == (0, 1)
    assert len(world.status["failures"]) == 1


def test_the_rank_of_a_lost_pod_is_not_its_seat():
    assert "rank" not in standing_by().end(1, 137).loss
    assert running().end(1, 137).loss["rank"] == 1


# --- The end ------------------------------------------------------------------------------


def test_success_is_counted_over_replicas():
    world = standing_by().end(1, 137).run(1).wait(30)
    assert world.end(1, 0, message=last_words(-1)).status.get("succeededReplicas", "") == ""
    for seat, replica in ((3, 1), (0, 0)):
        world.end(seat, 0, message=last_words(replica))
    assert (world.phase, world.status["succeededReplicas"]) == ("Running", "0-1")
    assert world.end(2, 0, message=last_words(2)).phase == "Succeeded"
    assert world.status["succeededReplicas"] == "0-2"
    assert world.counts == (1, 1, 0)


def test_the_end_may_come_before_the_new_pod():
    world = standing_by(graceful=True).end(1, 137)
    assert world.phase == "Restarting"
    for seat, replica in ((3, 1), (0, 0), (2, 2)):
        world.end(seat, 0, message=last_words(replica))
    assert (world.phase, world.status["attempt"]) == ("Succeeded", 2)


def test_a_pod_that_is_done_may_go_and_no_other_is_made():
    world = standing_by().end(1, 137).run(1).end(3, 0, message=last_words(1)).vanish(3)
    assert (world.phase, intent(world), len(world.pods)) == ("Running", (2, 1, "1:2"), 3)


def test_without_standby_a_report_moves_no_success():
    world = running().end(1, 0, message=last_words(2))
    assert world.status["succeededReplicas"] == "1"
