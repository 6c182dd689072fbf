"""Stories of gangs whose launchers restart processes in place: told, counted once, not charged."""

import json
from dataclasses import replace
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core import actions as act
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from support.world import World, env_of, job_object, rendered, running


def killed(number: int, replica: int = 1, **more: Any) -> dict[str, Any]:
    """A record as our launcher writes it, of a process that was killed with SIGKILL."""
    return {
        "round": number, "replica": replica, "rank": replica, "code": 137, "signal": 9,
        "kind": "signal", "step": 30, "snapshotStep": 20, "at": "2026-01-01T00:00:00Z", **more,
    }  # fmt: skip


def poll(world: World, count: int, *rounds: object, **more: int) -> World:
    return world.poll(*rounds, round=count, step=40, snapshotStep=40, **more)


def report(count: int, *rounds: object, **more: Any) -> str:
    return json.dumps({"version": 1, "kind": "signal", "round": count, "rounds": rounds, **more})


def in_place(world: World) -> tuple[int, int]:
    restarts = world.status["restarts"]
    return restarts["inPlace"], restarts["round"]


def test_a_round_is_told_with_its_cause_and_charged_to_nothing():
    world = poll(running(), 1, killed(0))
    assert (world.phase, world.status["attempt"]) == ("Running", 1)
    assert in_place(world) == (1, 1)
    assert world.counts == (0, 0, 0)
    assert world.status["failures"] == [world.loss]
    assert world.loss == {
        "attempt": 1, "round": 0, "replica": 1, "rank": 1, "pod": "job-1", "node": "node2",
        "class": "Killed", "reason": "SIGKILL", "exitCode": 137, "signal": 9,
        "message": "after step 30", "detectedAt": "2026-01-01T00:00:00.000000Z", "inPlace": True,
        "step": 30,
    }  # fmt: skip
    (event,) = world.events
    assert (event.type, event.reason) == ("Warning", "RestartedInPlace")
    assert "round 0 of attempt 1 ended: replica 1 (rank 1) on node2: SIGKILL" in event.message
    assert [(m.name, m.value, m.label) for m in world.measurements] == [
        ("rounds_total", 1, "Killed"), ("lost_steps", 10, None)]  # fmt: skip
    assert not [line for line in world.log if not line.startswith("status Running 1")]


@pytest.mark.parametrize(("saved", "again", "words"), [(30, 0, "nothing"), (29, 1, "1 step")])
def test_a_step_that_a_survivor_saved_is_in_the_event(saved, again, words):
    world = poll(running(), 1, killed(0, savedStep=saved, savedBy=2))
    assert f"; {words} repeated: saved by rank 2 after step {saved}; " in world.events[0].message
    assert ("lost_steps", again) in [(m.name, m.value) for m in world.measurements]


def test_a_round_is_counted_once_however_often_and_by_whom_it_is_heard():
    world = poll(running(), 1, killed(0))
    poll(world, 1, killed(0))
    world.restart_operator()
    world.feedback = replace(
        world.feedback, confirmed=act.QuorumRead(1, world.now), network_attempt=1
    )
    poll(world, 2, killed(0), killed(1, 2))
    assert in_place(world) == (2, 2)
    assert [f["round"] for f in world.status["failures"]] == [0, 1]
    assert [e.reason for e in world.events] == ["RestartedInPlace"] * 2


def drill(number: int) -> dict[str, Any]:
    return {"round": number, "kind": "drill", "step": 52, "snapshotStep": 50, "at": "..."}


def test_a_drill_is_told_and_counted_as_nothing():
    world = poll(running(), 1, drill(0))
    assert in_place(world) == (0, 1)
    assert (world.status.get("failures"), world.status.get("lastFailure")) == (None, None)
    assert "lastRoundAt" not in world.status["timings"]
    (event,) = world.events
    assert (event.type, event.reason) == ("Normal", "Drill")
    assert "round 0 of attempt 1 ended after step 52, as planned" in event.message
    assert world.measurements == []
    poll(world, 1, drill(0))
    assert len(world.events) == 1
    poll(world, 4, killed(1), drill(2))  # the record of round 3 was lost
    assert in_place(world) == (2, 4)
    assert [f["round"] for f in world.status["failures"]] == [1]
    told = [(e.type, e.reason) for e in world.events[1:]]
    assert told.count(("Normal", "Drill")) == 1
    assert told.count(("Warning", "RestartedInPlace")) == 2


def test_rounds_of_all_attempts_add_up_the_last_in_the_termination_report():
    world = poll(running(), 1, killed(0))
    last = report(3, killed(1), killed(2), rank=1, signal=9, step=50)
    world.end(1, 137, message=last).run()
    assert in_place(world) == (3, 0)
    assert (world.status["attempt"], world.counts) == (2, (1, 1, 0))
    assert [f.get("inPlace") for f in world.status["failures"]] == [True, True, True, None]
    assert world.loss["round"] == 3
    poll(world, 3, killed(2), attempt=1)  # an answer of the launcher that is gone
    assert in_place(world) == (3, 0)
    assert in_place(poll(world, 1, killed(0))) == (4, 1)


def test_the_last_words_of_any_launcher_tell_the_number_of_the_round():
    world = running().end(2, 137, message=report(2))
    assert in_place(world) == (2, 0)
    assert "2 rounds of attempt 1 ended, cause unknown" in world.events[0].message
    assert ("rounds_total", 2, "Unknown") in [
        (m.name, m.value, m.label) for m in world.measurements
    ]


def test_rounds_that_a_successful_job_had_are_counted_to_the_end():
    world = running()
    for replica in (1, 2, 0):
        world.end(replica, 0, message=report(1, killed(0), kind="success"))
    assert world.phase == "Succeeded"
    assert world.status["restarts"]["inPlace"] == 1
    assert "restarts: 0, in place: 1" in world.condition("Complete")["message"]


def test_rounds_of_a_suspended_job_are_counted_and_its_pods_may_still_save():
    world = poll(running(), 1, killed(0))
    world.graceful = True
    world.patch(suspend=True)
    assert world.pods["job-0"]["metadata"]["deletionGracePeriodSeconds"] == 30
    world.end(0, 143, message=report(2, killed(1), kind="sigterm"))
    assert in_place(world) == (2, 2)
    world.finish_deletions().patch(suspend=False).run()
    assert in_place(world) == (2, 0)
    # A resume is no recovery from the failure that only ended a round.
    assert "lastRecoverySeconds" not in world.status["timings"]


def test_more_rounds_than_records_are_counted_and_the_list_stays_bounded():
    world = poll(running(), 25, *(killed(number) for number in range(15, 25)))
    assert in_place(world) == (25, 25)
    assert [f["round"] for f in world.status["failures"]] == list(range(15, 25))
    assert [e.reason for e in world.events] == ["RestartedInPlace"] * 11 + ["CrashLooping"]
    assert "15 rounds of attempt 1" in world.events[-2].message


@pytest.mark.parametrize(
    ("record", "cls", "reason", "message"),
    [
        (killed(0), "Killed", "SIGKILL", "after step 30"),
        ({"round": 0, "rank": 2, "code": 1, "exception": "ValueError: no"}, "User", "ExitCode1",
         "ValueError: no"),
        (killed(0, kind="oom", exception="out of memory"), "OOM", "OOMKilled",
         "out of memory\nafter step 30"),
        ({"round": 0, "rank": 2, "code": 76, "kind": "hang"}, "Hang", "ExitCode76",
         "hang: no sign of life for longer than spec.hang allows"),
        ({"round": 0, "rank": 2, "kind": "hang", "signal": 9}, "Hang", "SIGKILL",
         "hang: no sign of life for longer than spec.hang allows"),
        ({"round": 0, "rank": 2, "code": 75, "kind": "peerLost"}, "Infrastructure", "ExitCode75",
         "peerLost: another rank failed first"),
        ({"round": 0, "rank": 2, "code": 143}, "Disruption", "SIGTERM", ""),
        ({"round": 0, "replica": 2, "code": "x"}, "User", "Unknown", ""),
        ({"round": 0, "replica": 2, "code": 255, "kind": "exit"}, "User", "ExitCode255", ""),
        ({"round": 0, "replica": 2, "code": 75, "kind": "exit"}, "User", "ExitCode75", ""),
    ],
)  # fmt: skip
def test_classes_of_rounds(record, cls, reason, message):
    failure = poll(running(), 1, record).status["lastFailure"]
    assert (failure["class"], failure["reason"], failure.get("message", "")) == (
        cls, reason, message)  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        None, 7, [], {}, {"round": "0"}, {"round": -1}, {"round": 1}, {"round": 10**30},
        {"round": 0}, {"round": 0, "replica": 3}, {"round": 0, "replica": -1, "rank": 10**12},
        {"round": 0, "rank": 99, "exception": "\x1b[31m" * 9999}, {"round": True, "rank": 1},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_leaves_a_round_of_unknown_cause(record):
    world = poll(running(), 1, record)
    assert in_place(world) == (1, 1)
    assert "failures" not in world.status
    assert "1 round of attempt 1 ended, cause unknown" in world.events[0].message


@pytest.mark.parametrize(
    ("restart", "budget"),
    [
        ({}, "3"), ({"inPlace": {}}, "3"), ({"inPlace": {"maxWithoutProgress": 7}}, "7"),
        ({"inPlace": {"enabled": False}}, "0"), ({"maxRestarts": 0}, "0"),
        ({"maxRestarts": 0, "inPlace": {"enabled": True}}, "0"),
    ],
)  # fmt: skip
def test_the_launcher_is_told_how_many_rounds_it_may_make(restart, budget):
    assert env_of(rendered(restart=restart))[contract.IN_PLACE_MAX_WITHOUT_PROGRESS] == budget


@pytest.mark.parametrize(
    ("rules", "codes"),
    [
        ([], ""),
        ([{"exitCodes": [42, 3], "action": "Fail"}, {"exitCodes": [3], "action": "Restart"}],
         "3,42"),
        ([{"exitCodes": [3], "action": "Restart"}, {"exitCodes": [42, 3], "action": "Fail"}], "42"),
        ([{"reasons": ["Hang", "SIGSEGV"], "action": "Fail"}], "76,139"),
        ([{"reasons": ["OOMKilled", "Evicted"], "action": "Fail"}], ""),
        ([{"exitCodes": list(range(1, 254)), "action": "Restart"},
          {"reasons": ["Error"], "action": "Fail"}], "254,255"),
    ],
)  # fmt: skip
def test_what_the_users_rules_fail_is_not_restarted_in_place(rules, codes):
    assert env_of(rendered(restart={"rules": rules}))[contract.IN_PLACE_FINAL_EXIT_CODES] == codes


@pytest.mark.parametrize(
    ("port", "metrics", "declared", "hub"),
    [
        (29500, 9400, [], 29501), (29500, 29501, [], 29502), (29500, 29501, [29502], 29503),
        (65535, 9400, [], 65534), (65534, 65535, [65533], 65532), (1024, 65535, [1025], 1026),
    ],
)  # fmt: skip
def test_the_hub_has_a_port_of_its_own(port, metrics, declared, hub):
    sidecar = {"name": "side", "ports": [{"containerPort": number} for number in declared]}
    template = {"spec": {"containers": [{"name": "trainer"}, sidecar]}}
    fields = {"port": port, "metrics": {"port": metrics}, "template": template}
    assert env_of(rendered(**fields))[contract.HUB_PORT] == str(hub)
    obj = job_object(**fields)
    _, service, policy = render.network(observe.job(obj), spec.parse(obj["spec"]))
    assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == {
        "master": port, "hub": hub, "metrics": metrics}  # fmt: skip
    gang, everyone, *own = policy["spec"]["ingress"]
    assert [p["port"] for one in own for p in one["ports"]] == declared, "they ask to be reached"
    assert "ports" not in gang, "members reach each other on every port, the hub's too"
    assert [p["port"] for p in everyone["ports"]] == [metrics]


def test_a_hang_that_ends_the_attempt_is_told_as_such():
    world = running().end(1, 76, message=report(0, kind="hang", rank=1, log=["waiting"]))
    assert (world.loss["class"], world.loss["reason"], world.counts[1]) == ("Hang", "ExitCode76", 1)
    assert world.loss["message"].startswith("hang: no sign of life")


@pytest.mark.fault("T11")
def test_rounds_whose_processes_find_no_name_are_a_stall_until_one_gets_on():
    why = "Hang: job-0.job.ns.svc does not resolve (Name or service not known); rank 1 hangs"
    world = poll(running(), 1, killed(0, exception="ValueError: no")).wait(60)
    assert not world.stalled
    world = poll(world, 2, killed(1, code=76, signal=0, kind="hang", exception=why))
    assert world.stalled == world.status["reason"] == "NamesNotResolved"
    assert why in world.condition("Stalled")["message"]
    assert poll(world.wait(60), 2).stalled
    assert not world.poll(step=41).wait(60).wait(2).stalled
