"""Stories of gangs in which only lost pods are replaced, or that restart whole instead."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core import actions as act
from support.world import (
    Machines,
    World,
    env_of,
    intent,
    job_object,
    kept_off,
    refusal,
    running,
    started,
)

LOST = {"round": 0, "replica": 1, "kind": "lost", "step": 30, "snapshotStep": 20}


def holding(*, graceful: bool = False, **spec: Any) -> World:
    """A gang that runs, whose launchers have said that they wait for a lost one's replacement."""
    world = running(graceful=graceful, **spec).poll(holds=True).wait(2)
    assert world.status["holds"] is True
    world.log.clear()
    return world


def uids(world: World) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in world.pods.items()}


def replaced(world: World) -> int:
    return int(world.status["restarts"]["replaced"])


# --- Replaced alone -----------------------------------------------------------------------


@pytest.mark.parametrize("replica", range(3))
@pytest.mark.parametrize("how", ["killed", "vanished", "deleted"])
@pytest.mark.fault("N3", "T5")
def test_a_lost_pod_is_replaced_and_the_others_are_kept(replica, how):
    world = holding()
    before = uids(world)
    if how == "killed":
        world.end(replica, 137)
    elif how == "vanished":
        world.vanish(replica)
    else:
        world.terminate(replica).end(replica, 143)
    assert intent(world) == (2, 1, f"{replica}:2")
    assert world.phase == "Starting"
    kept = {name for name, uid in uids(world).items() if before[name] == uid}
    assert kept == before.keys() - {f"job-{replica}"}
    assert [line for line in world.log if line.startswith("create")] == [f"create job-{replica} 2"]
    assert world.counts == ((1, 1, 0) if how == "killed" else (1, 0, 1))
    assert (replaced(world), world.loss["replaced"], world.loss["replica"]) == (1, True, replica)
    assert world.condition("Running")["reason"] == "Replacing"
    assert f"; replacing replica {replica} (" in world.told("Replacing")[0]
    assert world.run().phase == "Running"
    assert intent(world) == (2, 1, f"{replica}:2")
    assert "replacingSince" not in world.status["timings"]
    assert "lastRecoverySeconds" in world.status["timings"]


@pytest.mark.parametrize(("replica", "hub"), [(0, "2"), (1, "1")])
def test_a_replacement_knows_the_hub_that_it_may_follow(replica, hub):
    world = holding().end(replica, 137)
    env = env_of(world.pods[f"job-{replica}"])
    names = (contract.ATTEMPT, contract.HUB, contract.REPLACEMENT, contract.REPLACE_SECONDS)
    assert [env[name] for name in names] == ["2", hub, "1", "300"]
    other = env_of(world.pods["job-2"])
    assert (other[contract.HUB], contract.REPLACEMENT in other) == ("1", False)
    uid = {"name": contract.POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    assert uid in world.pods["job-2"]["spec"]["containers"][0]["env"]


@pytest.mark.fault("N24")
def test_on_the_hosts_network_a_replacement_has_the_ports_of_the_gang():
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "trainer"}]}}
    world = holding(template=template)
    names = ("MASTER_PORT", contract.HUB_PORT, contract.METRICS_PORT)
    before = env_of(world.pods["job-1"])
    after = env_of(world.end(1, 137).pods["job-1"])
    assert [after[name] for name in names] == [before[name] for name in names]
    assert before[contract.REPLACE_SECONDS] == "0", "so launchers of one node do not hold"


def test_replicas_replaced_one_by_one_each_count_their_newest_pod():
    world = holding()
    for replica, births in ((1, "1:2"), (2, "1:2,2:3"), (1, "1:4,2:3")):
        world.wait(400).end(replica, 137).run()
        assert (world.phase, world.status["births"]) == ("Running", births)
    assert (world.attempts(), replaced(world), world.status["membersSince"]) == ({1, 3, 4}, 3, 1)


@pytest.mark.fault("N10")
def test_the_object_of_a_lost_pod_is_waited_for_and_not_counted_again():
    world = holding(graceful=True).end(1, 137)
    assert (world.phase, world.attempts()) == ("Restarting", {1})
    assert world.pods["job-1"]["metadata"]["deletionGracePeriodSeconds"] == 0
    assert world.wait(60).counts == (1, 1, 0)
    assert world.stalled == "WaitingForDeletion"
    assert "UTC, then all restart" in world.condition("Stalled")["message"]
    assert (world.finish_deletions().phase, world.attempts()) == ("Starting", {1, 2})


# --- The whole gang -----------------------------------------------------------------------


def polled(**state):
    return running().poll(**state).wait(2)


#: All restart, since the others cannot wait, or nobody is left to wait, or one is done.
WHOLE = {
    "no time": lambda: holding(restart={"replaceSeconds": 0}).end(0, 137),
    "no rounds": lambda: holding(restart={"inPlace": {"enabled": False}}).end(0, 137),
    "no others": lambda: holding(replicas=1).end(0, 137),
    "nobody has asked": lambda: running().end(1, 137),
    "launchers do not hold": lambda: polled(holds=False).end(1, 137),
    "older launchers do not say": lambda: polled(round=1).end(1, 137),
    "another hub's word": lambda: polled(holds=True, attempt=7).end(1, 137),
    "all are lost": lambda: holding().all_end(137).settle(),
    "one is done": lambda: holding().end(0, 0).end(1, 137),
}


@pytest.mark.parametrize("story", WHOLE.values(), ids=WHOLE)
@pytest.mark.fault("N24")
def test_where_the_others_cannot_wait_all_restart(story):
    world = story().sees(intent=(2, 2, ""), replaced=0)
    assert "replaced" not in world.loss


NO_SPACE = {"version": 1, "kind": "exception", "code": 1, "exception": "launcher: no space left"}
TOLD = '{"version": 1, "kind": "sigterm", "code": 143}'


def lost_again(replace_seconds, delay=8, **more):
    backoff = {"initialSeconds": delay, "maxSeconds": delay}
    restart = {"replaceSeconds": replace_seconds, "backoff": backoff}
    return holding(restart=restart).vanish(1).run().vanish(1).sees(phase="Restarting", pause=delay)


def graces(world):
    return {pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.pods.values()}


def fewer_births(world):
    world.api.prunes = frozenset({"births"})


DECISIONS = {
    "what no restart cures ends the job": lambda: holding().end(1, 2).sees(phase="Failed"),
    "so does one disruption too many": lambda: (
        holding(restart={"maxDisruptions": 0}).vanish(1)
        .sees(phase="Failed", reason="MaxDisruptionsExceeded")),
    "a launcher that never came to the hub ends for nobody else": lambda: (
        holding(replicas=4).vanish(1).vanish(2).run(1).end(1, 1, message=json.dumps(NO_SPACE))
        .sees(intent=(4, 1, "1:4,2:3"), counts=(2, 1, 1))),
    "one that was told to end leaves others that wait": lambda: (
        holding().terminate(1).end(1, 143, message=TOLD).sees(intent=(2, 1, "1:2"))),
    "a backoff is waited for": lambda: (
        lost_again(300).sees(intent=(3, 1, "1:3")).wait(8).sees(phase="Starting")),
    "unless the others do not wait so long": lambda: (
        lost_again(8).sees(intent=(3, 3, "")).wait(8).sees(phase="Starting")),
    **{f"a delay is waited for where all restart in the end, as one ended with {code}":
       lambda code=code: (
        lost_again(300, 60).wait(20).end(0, code, settle=False).end(2, code)
        .sees(intent=(4, 4, ""), pause=40)
        .wait(39).sees(phase="Restarting").wait(1).sees(phase="Starting")) for code in (0, 75)},
    "a resume forgets that launchers waited": lambda: (
        holding().patch(suspend=True).patch(suspend=False).run().wait(2).sees(holds=None)
        .end(1, 137).sees(intent=(3, 3, ""))),
    "a later suspension leaves the others time to save": lambda: (
        holding(graceful=True).end(1, 137).finish_deletions().run().patch(suspend=True)
        .do(lambda w: check(graces(w), {30}))),
    "a survivor that is being removed has nothing to save": lambda: (
        holding(graceful=True).end(1, 137).terminate(2)
        .sees(intent=(3, 1, "1:3,2:3"), counts=(2, 1, 1))),
    # One whom the hub refuses, as of another version, would come again and again.
    "a replacement that ends as a peer is a loss of its own": lambda: (
        holding(replicas=4).end(1, 137, settle=False).end(2, 137).run(1).end(1, 75)
        .sees(counts=(1, 1, 0)).wait(5).sees(counts=(2, 1, 1), intent=(3, 1, "1:3,2:2"))),
    "a suspension ends it": lambda: (
        holding(graceful=True).end(1, 137).patch(suspend=True).finish_deletions()
        .sees(phase="Suspended", births=None, replacing=False)
        .patch(suspend=False).run().sees(intent=(3, 3, ""), counts=(1, 1, 0))),
    "and a deadline of the job": lambda: (
        holding(graceful=True, activeDeadlineSeconds=60).end(1, 137).wait(60)
        .sees(phase="Failed", reason="DeadlineExceeded", replacing=False)),
    "one who is done meanwhile waits for nobody": lambda: (
        holding(graceful=True).end(1, 137).end(2, 0).sees(intent=(3, 3, ""), counts=(1, 1, 0))
        .tells("Restarting", "replica 2 ended with 0")),
    # The one before had ended with 0 too, and was removed before that was stored.
    "a new pod after the others have ended restarts all uncharged": lambda: (
        holding().vanish(1).run(1).sees(phase="Running", intent=(2, 1, "1:2"), counts=(1, 0, 1))
        .end(0, 0).end(2, 0).wait(330).end(1, 75).wait(5)
        .sees(intent=(3, 3, ""), counts=(1, 0, 1))
        .tells("Restarting", "before the new pod of replica 1 joined them")
        .run().all_end(0).settle().sees(phase="Succeeded")),
    "its own failure is a loss": lambda: joined(1, 0, 2).end(1, 1).wait(5).sees(total=2),
    "and so is one while the hub is there": lambda: joined(1, 2).end(1, 75).wait(5).sees(total=2),
    "and one of the hub's own new pod": lambda: joined(0, 1, 2).end(0, 75).wait(5).sees(total=2),
    "a CRD that drops the births has the whole gang restarted": lambda: (
        holding().do(fewer_births).end(1, 137).sees(intent=(3, 3, ""), counts=(1, 1, 0))
        .tells("Restarting", "the CRD is older than the operator").run().sees(phase="Running")),
    "a new pod that the next operator misses is kept": lambda: (
        missed(holding(replicas=4, graceful=True).end(1, 137).finish_deletions()
               .sees(phase="Starting", intent=(2, 1, "1:2")).restart_operator())
        .sees(intent=(3, 1, "1:2,2:3"))),
}  # fmt: skip


def check(found, wanted):
    assert found == wanted


def joined(lost, *done):
    """A gang with one new pod, of which others have ended with 0."""
    world = holding().vanish(lost).run(lost)
    for replica in done:
        world.end(replica, 0)
    return world


def missed(world):
    """Another one is lost, and the new pod shows only when a quorum is asked."""
    unseen = world.pods.pop("job-1")
    world.end(2, 74, settle=False)
    (read,) = world.until(act.ConfirmGone).plan().actions
    world.pods["job-1"] = unseen
    world.carry_out(read)
    return world.settle()


@pytest.mark.parametrize("story", DECISIONS.values(), ids=DECISIONS)
def test_what_follows_a_loss(story):
    story()


@pytest.mark.parametrize(("kind", "code"), [("exception", 1), ("signal", 139), ("hang", 76)])
def test_when_the_hub_has_ended_the_attempt_nobody_waits(kind, code):
    """After the last round in place: the cause has words of its own, the others end with 75."""
    words = {"version": 1, "kind": kind, "code": code, "round": 3}
    world = holding(graceful=True).end(1, code, message=json.dumps(words))
    assert (intent(world), replaced(world), world.pause()) == ((2, 2, ""), 0, 0)
    assert "replaced" not in world.loss
    world.end(0, 75).end(2, 75)
    assert (intent(world), world.counts[0]) == ((2, 2, ""), 1)


@pytest.mark.parametrize("replica", range(3))
@pytest.mark.fault("N13")
def test_a_failed_gpu_costs_its_pod_which_goes_to_another_node(replica):
    words = json.dumps({"version": 1, "kind": "hardware", "code": 74, "round": 0})
    world = holding().end(replica, 74, message=words)
    assert (intent(world), world.counts) == ((2, 1, f"{replica}:2"), (1, 0, 1))
    assert (replaced(world), world.attempts()) == (1, {1, 2})
    node = world.loss["node"]
    assert kept_off(world.pods[f"job-{replica}"]) == [node] == world.status["avoidedNodes"]
    assert world.run().phase == "Running"


def test_an_older_hub_ends_all_with_a_failed_gpu_and_all_restart():
    words = json.dumps({"version": 1, "kind": "hardware", "code": 74, "round": 0})
    world = holding().end(1, 74, message=words).end(0, 75).end(2, 75).wait(5)
    assert (intent(world), world.counts) == ((3, 3, ""), (1, 0, 1))
    assert world.status["avoidedNodes"] == [world.loss["node"]]


@pytest.mark.parametrize(("lost", "alone"), [(256, True), (257, False)])
def test_no_more_replacements_than_the_status_holds(lost, alone):
    world = holding(replicas=300)
    for replica in range(lost):
        world.end(replica, 137, settle=False)
    (write,) = world.plan().actions
    assert isinstance(write, act.WriteStatus)
    assert write.status["membersSince"] == (1 if alone else 2)


# --- While it is under way ----------------------------------------------------------------


@pytest.mark.fault("N22")
@pytest.mark.parametrize("how", ["killed", "vanished"])
def test_what_is_lost_with_the_cause_joins_it(how):
    """A pod that is being removed is the cause of a peer's end, or lost beside another cause."""
    world = holding(graceful=True).terminate(2)
    world = world.end(1, 137) if how == "killed" else world.vanish(1)
    assert (intent(world), world.counts) == ((2, 1, "1:2,2:2"), (1, 0, 1))
    assert "replacing replicas 1-2" in world.told("Replacing")[0]
    assert world.finish_deletions().run().phase == "Running"


@pytest.mark.parametrize(("code", "counts"), [(137, (2, 2, 0)), (75, (1, 1, 0))])
@pytest.mark.fault("N22")
def test_another_pod_that_is_lost_joins_and_only_its_own_loss_is_counted(code, counts):
    world = holding(graceful=True).end(1, 137)
    since = world.status["timings"]["replacingSince"]
    world.wait(10).end(2, code).wait(5)
    assert (intent(world), world.counts) == ((3, 1, "1:3,2:3"), counts)
    assert world.status["timings"]["replacingSince"] == since
    assert (world.finish_deletions().wait(2).phase, world.attempts()) == ("Starting", {1, 3})
    assert world.run().phase == "Running"


@pytest.mark.parametrize(
    ("how", "counts"), [("OOMKilled", (1, 1, 0)), ("Error", (1, 1, 0)), ("vanished", (1, 0, 1))]
)
def test_pods_that_end_at_one_moment_are_one_loss_whenever_kubelets_tell(how, counts):
    world = holding(replicas=8, graceful=True)
    for replica in range(1, 7):
        world = world.vanish(replica) if how == "vanished" else world.end(replica, 137, reason=how)
        world.wait(0.5)
    assert (world.counts, world.pause()) == (counts, 0)
    assert world.finish_deletions().run().phase == "Running"
    assert world.status["membersSince"] == 1


@pytest.mark.fault("N22")
def test_when_nobody_waits_any_more_all_restart_at_once():
    world = holding(graceful=True).end(1, 137)
    world.end(0, 75, settle=False).end(2, 75)
    assert (intent(world), world.counts) == ((3, 3, ""), (1, 1, 0))
    assert "no other pod waits" in world.told("Restarting")[0]


def test_launchers_that_all_give_up_are_few_writes():
    """As 1,000 that have held for a pod on a silent node, told by their kubelets within seconds."""
    world = holding(replicas=40, graceful=True).end(1, 137)
    for replica in (0, *range(2, 40)):
        world.wait(0.05).end(replica, 75)
    assert (intent(world), world.counts) == ((3, 3, ""), (1, 1, 0))
    assert len([line for line in world.log if line.startswith("status")]) <= 4


def test_replacements_that_end_as_peers_in_turns_are_counted_and_wait():
    world = holding(replicas=4).end(1, 137, settle=False).end(2, 137)
    for replica in (1, 2, 1, 2, 1):
        world.wait(world.pause()).run(replica).end(replica, 75).wait(5)
    assert (world.counts, world.pause()) == ((6, 1, 5), 16)


@pytest.mark.fault("N23")
def test_past_the_deadline_all_restart_for_the_reason_of_the_delay():
    world = holding().end(1, 137).waiting(1, "ImagePullBackOff", "no such image")
    assert world.stalled == "ImagePullBackOff"
    until = "; the other pods wait until 00:05:02 UTC, then all restart"
    assert world.condition("Stalled")["message"].endswith(until)
    assert world.status["stalled"] == {"known": "Cause", "until": "2026-01-01T00:05:02.000000Z"}
    assert world.wait(299).status["attempt"] == 2
    assert intent(world.wait(1)) == (3, 3, "")
    assert (world.counts, replaced(world)) == ((1, 1, 0), 1)
    (told,) = world.told("ReplaceDeadlineExceeded")
    assert told == (
        "replica 1 did not run within spec.restart.replaceSeconds 300: pod job-1: no such image; "
        "restarting all pods"
    )
    assert "replacingSince" not in world.status["timings"]


def test_the_deadline_is_told_while_there_is_one():
    no_room = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    world = holding().end(1, 137)
    for seconds, told in ((10, True), (80, False)):
        for pod in world.wait(seconds).pods.values():
            if "containerStatuses" not in pod["status"]:
                pod["status"]["conditions"] = [no_room]
        world.wait(10)
        assert world.stalled == "Unschedulable"
        assert ("then all restart" in world.condition("Stalled")["message"]) is told
        world.wait(200 * told)


@pytest.mark.fault("N23")
def test_the_deadline_ends_a_wait_for_an_old_pod_too():
    world = holding(graceful=True).end(1, 137).wait(300)
    assert intent(world) == (3, 3, "")


@pytest.mark.parametrize("code", [403, 422])
@pytest.mark.fault("N23")
def test_a_refused_pod_is_tried_again_until_the_deadline(code):
    world = holding()
    quota = "pods is forbidden: exceeded quota: q"
    world.refuse = lambda _: refusal(code, quota)
    world.end(1, 137).wait(30)
    assert (intent(world), world.attempts()) == ((2, 1, "1:2"), {1})
    assert world.stalled == "Reason"
    world.refuse = lambda _: None
    assert world.wait(60).run().phase == "Running"
    assert intent(world) == (2, 1, "1:2")


@pytest.mark.fault("O7")
def test_only_who_has_begun_makes_the_pods_and_each_once():
    """Else two pods of one attempt, and two hubs of one number, could be (rule O5)."""
    world = holding().end(0, 137, settle=False).until(act.CreatePod).restart_operator().settle()
    assert (intent(world), world.counts) == ((3, 1, "0:3"), (1, 1, 0))
    assert (world.attempts(), env_of(world.pods["job-0"])[contract.HUB]) == ({1, 3}, "3")
    # A creation whose outcome is unknown.
    world = holding().end(1, 137, settle=False).until(act.CreatePod)
    world.feedback = replace(world.feedback, confirmed=None)
    assert intent(world.settle()) == (3, 1, "1:3")
    # The pod is there: nothing is missing.
    world = holding().end(1, 137).restart_operator().settle()
    assert intent(world.run()) == (2, 1, "1:2")


@pytest.mark.fault("O7")
def test_the_next_process_makes_no_second_hub_of_a_whole_start():
    """The pod may have been there, given out rounds, and be gone (K1): all begin again."""
    for world in (started(), running().all_end(1).settle()):
        attempt, counts = world.status["attempt"], world.counts
        del world.pods["job-0"]
        world.restart_operator().settle()
        assert (intent(world), world.counts) == ((attempt + 1, attempt + 1, ""), counts)
        assert world.attempts() == {attempt + 1}
        assert "whether the pod of replica 0 was created" in world.told("Restarting")[-1]
        assert world.run().phase == "Running"


@pytest.mark.fault("O7")
def test_pods_missing_after_a_crash_are_made_in_the_same_attempt():
    """Replica 0's is made first, and its hub takes in who comes."""
    world = started()
    del world.pods["job-1"], world.pods["job-2"]
    assert intent(world.restart_operator().settle().run()) == (1, 1, "")
    # A creation whose outcome is unknown is repeated by the process that knows of it.
    world = World().until(act.CreatePod)
    world.feedback = replace(world.feedback, confirmed=None)
    assert intent(world.settle()) == (1, 1, "")


@pytest.mark.fault("O7")
def test_another_process_that_finds_the_intent_goes_on_with_it():
    world = holding().end(1, 137, settle=False).until(act.DeletePod).restart_operator().settle()
    assert (intent(world), world.counts) == ((2, 1, "1:2"), (1, 1, 0))
    world = holding().end(1, 137, settle=False).until(act.ConfirmGone).restart_operator().settle()
    assert (intent(world), world.attempts()) == ((2, 1, "1:2"), {1, 2})


def test_lost_pods_alone_are_read_but_for_a_final_decision_all():
    """One lost meanwhile is not taken for read."""

    def reads(world: World, replica: int) -> act.Action:
        del world.pods[f"job-{replica}"]
        (read,) = world.until(act.ConfirmGone).plan().actions
        world.carry_out(read)
        return read

    world = holding(replicas=100)
    assert reads(world, 7) == act.ConfirmGone(1, seats=frozenset({7}))
    assert "replica in (7)" in [c.name for c in world.wire.calls if c.verb == "list"][-1]
    (barrier,) = world.until(act.ConfirmGone).plan().actions
    assert barrier == act.ConfirmGone(2, seats=frozenset({7})), "is the seat free"
    world.carry_out(barrier)
    assert reads(world, 8) == act.ConfirmGone(2, seats=frozenset({7, 8}))
    world = world.until(act.ConfirmGone)
    world.carry_out(act.ConfirmGone(3, seats=frozenset({7})))
    assert world.plan().actions == (act.ConfirmGone(3, seats=frozenset({7, 8})),)
    assert intent(world.settle()) == (3, 1, "7:3,8:3")
    world = holding(activeDeadlineSeconds=60)
    del world.pods["job-0"]
    (read,) = world.until(act.ConfirmGone).plan().actions
    assert read == act.ConfirmGone(1, seats=frozenset({0}))
    world.now += timedelta(seconds=61)  # before it is carried out
    world.carry_out(read)
    assert world.until(act.ConfirmGone).plan().actions == (act.ConfirmGone(2),)
    assert world.settle().status["reason"] == "DeadlineExceeded"
    world = holding(activeDeadlineSeconds=60)
    world.now += timedelta(seconds=61)
    assert reads(world, 0) == act.ConfirmGone(1), "one read for both"
    assert world.settle().status["reason"] == "DeadlineExceeded"
    assert (intent(world), world.told("Replacing")) == ((1, 1, ""), [])


@pytest.mark.parametrize("code", [1, 74, 75, 137])
@pytest.mark.parametrize("there", [True, False])
def test_a_pod_missing_only_in_the_cache_is_read_before_a_loss_counts(code, there):
    """Its floor would be raised, and its pod, which is well, deleted (rule E14)."""
    world = holding()
    unseen = world.pods.pop("job-2")
    world.end(1, code, settle=False)
    (read,) = world.until(act.ConfirmGone).plan().actions
    assert (read, intent(world)) == (act.ConfirmGone(1, seats=frozenset({2})), (1, 1, ""))
    world.pods.update({"job-2": unseen} if there else {})
    world.carry_out(read)
    assert intent(world.settle().wait(5)) == (2, 1, "1:2" if there else "1:2,2:2")


@pytest.mark.parametrize("births", ["", "x", "1:2:3", "1:9", "1:1,2:0", "99:2", "1:" + "9" * 99])
def test_births_that_somebody_wrote_leave_a_gang_that_comes_back(births):
    world = holding().end(1, 137).run()
    world.job["status"]["births"] = births
    assert world.wait(600).end(2, 137).run().phase == "Running"


# --- Rounds -------------------------------------------------------------------------------


def test_rounds_are_counted_by_the_hubs_number():
    crash = {"round": 0, "replica": 2, "code": 1}
    world = holding().poll(crash).end(1, 137).run().sees(rounds=(1, 1))
    assert world.poll(crash, {**crash, "round": 1}).sees(rounds=(2, 2)).loss["attempt"] == 1
    world.wait(400).end(0, 137).run().sees(rounds=(2, 0))
    world.poll(crash, {**crash, "round": 1}, attempt=1).sees(rounds=(2, 0))  # of the hub before
    assert world.poll(crash).sees(rounds=(3, 1)).loss["attempt"] == 3


PEER_LOST = '{"version": 1, "kind": "peerLost", "round": 5}'
ROUNDS = {
    "the last words of a launcher older than the hub": lambda: (
        holding(graceful=True).end(0, 137).end(1, 75, message=PEER_LOST).sees(rounds=(0, 0))),
    "those of one of the hub's": lambda: (
        holding(graceful=True).end(1, 137).end(2, 75, message=PEER_LOST).sees(rounds=(5, 5))),
    "one that a lost pod has ended": lambda: (
        holding().end(1, 137).run().poll(LOST).sees(rounds=(0, 1), counts=(1, 1, 0))
        .tells("RestartedInPlace", times=0)),
}  # fmt: skip


@pytest.mark.parametrize("story", ROUNDS.values(), ids=ROUNDS)
def test_a_round_is_counted_once_with_its_cause(story):
    story()


def test_a_link_that_broke_without_a_lost_pod_is_a_round():
    loss = holding().poll(LOST).sees(rounds=(1, 1), counts=(0, 0, 0)).loss
    assert (loss["class"], loss["inPlace"]) == ("Infrastructure", True)
    assert "the connection to its launcher broke" in loss["message"]


def test_an_older_crd_repeats_no_event_of_a_stall_and_keeps_the_hand_over():
    """It drops status.stalled, so nobody knows what was said."""
    world = World(job_object(), machines=Machines())
    world.api.prunes = frozenset({"stalled"})
    for nodes in (5, 6, 7):
        said = f"0/{nodes} nodes are available: 1 Insufficient cpu."
        condition = {"type": "PodScheduled", "status": "False", "message": said}
        for pod in world.settle().pods.values():
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
        world.settle().wait(30)
    assert (world.stalled, len(world.told("Unschedulable"))) == ("Unschedulable", 1)


def test_what_waits_for_a_time_is_looked_at_then():
    """A node about to go, behind a restart; a silent one, while most are."""
    machines, backoff = Machines(), {"backoff": {"initialSeconds": 1, "maxSeconds": 10}}
    world = running(machines=machines, restart=backoff).poll(step=5).end(1, 1).wait(400).run()
    machines.signals = {"node1": "condition KernelDeadlock"}
    assert 0 < (world.settle().wait(2.5).plan().requeue_after or 0) <= 60
    spec = {"snapshot": {"path": "/s", "volume": {"emptyDir": {}}}}
    machines = Machines()
    world = running(machines=machines, nodeLost={"policy": "Fence", "afterSeconds": 30}, **spec)
    machines.others_up, machines.others_down, machines.calm_since = 2, 5, world.now
    world.fall_silent("node2")
    assert 0 < (world.wait(5).plan().requeue_after or 0) <= 30


def test_what_had_broken_the_gang_is_said_to_the_end():
    world = running(graceful=True, restart={"maxRestarts": 0}).end(1, 1, settle=False)
    world.patch(suspend=True)
    said = world.condition("Suspended")["message"]
    assert "the gang had already failed" in said
    world.pods.clear()
    world.settle().wait(20)
    assert world.condition("Suspended")["status"] == "True"
    assert world.condition("Suspended")["message"] in said
    world = running(machines=Machines(), activeDeadlineSeconds=60, restart={"maxRestarts": 0})
    report = json.dumps({"version": 1, "kind": "exception", "code": 1, "exception": "KeyError: 1"})
    world.wait(57).end(1, 1, message=report).wait(3)
    assert (world.status["reason"], world.status["message"]) == ("DeadlineExceeded", "KeyError: 1")
