"""A trainer that its kubelet ends for a probe of the template: proved by Events, or as before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core import classify
from ddpjob_operator.core.objects import compact_spec, observe
from ddpjob_operator.core.policy.restarting import probe
from support.world import START, World, job_object, running
from unit.operator_core.test_classify import (
    AT,
    DELETED,
    EMPTY_DIR,
    EVICTION,
    KILLED,
    OOM,
    RAISED,
    SIGTERM,
    ended,
    init_failed,
    pod,
    report,
)

PROBE = {"exec": {"command": ["cat", "/tmp/alive"]}, "periodSeconds": 5}
KILLING = "Container trainer failed liveness probe"
SAID = "Liveness probe failed: cat: /tmp/alive: No such file or directory"
WORDS = f"{KILLING}: {SAID}"


def template(name: str = "trainer", **container: Any) -> dict[str, Any]:
    sidecar = {"name": "sidecar", "image": "sidecar", "livenessProbe": PROBE}
    trainer = {"name": name, "image": "trainer", **container}
    return {"spec": {"containers": [trainer, sidecar]}}


def probed(**spec: Any) -> World:
    """A gang whose trainers have a probe, at work."""
    return running(template=template(livenessProbe=PROBE), **spec)


def fail(world: World, replica: int, code: int = 143, words: str = WORDS) -> World:
    world.probed[world.pods[f"job-{replica}"]["metadata"]["uid"]] = words
    return world.end(replica, code)


def questions(world: World) -> list[str]:
    return [line for line in world.log if line.startswith("events of")]


def event(reason: str, message: object, at: str | None = AT) -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": at}


STOPPING, LATER = "Stopping container trainer", "2026-01-01T00:00:05Z"
STARTUP = "Container trainer failed startup probe"
TEMPORARY = event("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503")


@pytest.mark.fault("N18")
@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event("Killing", KILLING)], KILLING),
        # With a restartPolicy that is not ours.
        ([event("Killing", f"{KILLING}, will be restarted")], KILLING),
        ([event("Unhealthy", SAID), event("Killing", KILLING), TEMPORARY], WORDS),
        # Of several the newest, whatever the order of the list.
        ([event("Unhealthy", SAID, "2026-01-01T00:00:05Z"), event("Killing", KILLING),
          event("Unhealthy", "Liveness probe failed: before", "2026-01-01T00:00:04Z")], WORDS),
        ([event("Unhealthy", "Startup probe errored and resulted in unknown state: rpc\nerror"),
          event("Unhealthy", SAID), event("Killing", STARTUP)],
         f"{STARTUP}: Startup probe errored and resulted in unknown state: rpc error"),
        # No proof: others end containers, too, and a probe that fails need not have ended it.
        ([], ""),
        ([event("Unhealthy", SAID)], ""),
        # Of a pod with no other container, or none that runs on, as Kubernetes 1.36 tells it.
        ([event("Killing", STOPPING), event("Unhealthy", SAID)], SAID),
        ([event("Killing", STOPPING, LATER), event("Unhealthy", SAID)], SAID),
        ([event("Killing", STOPPING), event("Unhealthy", SAID, LATER)], SAID),  # while it ended
        # That is told of any end: nothing failed, or long before, or only a readiness probe.
        ([event("Killing", STOPPING)], ""),
        ([event("Killing", STOPPING, "2026-01-01T00:00:06Z"), event("Unhealthy", SAID)], ""),
        ([event("Killing", STOPPING, None), event("Unhealthy", SAID)], ""),
        ([event("Killing", STOPPING), TEMPORARY], ""),
        ([event("Killing", "Preempted in order to admit critical pod")], ""),
        ([event("Started", KILLING)], ""),
        # Whatever a stranger writes.
        ([event("Killing", None), event("Killing", 7, None), {}], ""),
        ([event("Killing", KILLING), event("Unhealthy", "Liveness probe failed: \x1b[2J")],
         f"{KILLING}: Liveness probe failed: \N{REPLACEMENT CHARACTER}[2J"),
    ],
)  # fmt: skip
def test_a_kubelets_event_proves_a_failed_probe(events: list[dict[str, Any]], words: str):
    assert probe.words(map(probe.parse, events)) == words


FAILED = ("User", "ProbeFailed")


@pytest.mark.fault("N18")
@pytest.mark.parametrize(
    ("raw", "judgement"),
    [
        (pod(ended(143)), FAILED),
        (pod(ended(143, message=SIGTERM)), FAILED),
        (pod(ended(143, message=report("sigterm", 137))), FAILED),
        (pod(ended(137)), FAILED),  # after its grace period
        (pod(ended(1)), FAILED),  # as torchrun ends when it is told to
        (pod(ended(143, OOM)), FAILED),  # one that was survived before
        # A sidecar is still at work, and keeps the pod's phase.
        (pod(ended(143), phase="Running"), FAILED),
        # What takes the pod beats what its kubelet did to the container.
        (pod(ended(143), meta=DELETED), ("Disruption", "PodDeleted")),
        (pod(ended(143), disrupted=EVICTION), ("Disruption", "EvictionByEvictionAPI")),
        (pod(ended(143), reason="Evicted", message=EMPTY_DIR), ("User", "StorageLimitExceeded")),
    ],
)
def test_a_proved_probe_is_the_programs_doing(raw: dict[str, Any], judgement: tuple[str, str]):
    found = classify.failure(replace(observe.pod(raw), probed=WORDS), 1, START)
    assert found
    assert (found.cls, found.reason) == judgement


@pytest.mark.fault("N18")
@pytest.mark.parametrize(
    ("raw", "asked"),
    [
        *[(pod(ended(code)), True) for code in (143, 137, 1, 3, 139)],
        (pod(ended(143, message=SIGTERM)), True),
        (pod(ended(143, message="step 7")), True),
        # The launcher was not told to end.
        (pod(ended(1, message=RAISED)), False),
        (pod(ended(137, message=KILLED)), False),
        (pod(ended(75, message=report("peerLost", 75))), False),
        # A code that means something; a cause that is known.
        *[(pod(ended(code)), False) for code in (0, 2, 64, 70, 74, 75, 76, 126)],
        (pod(ended(137, OOM)), False),
        (pod(ended(128, "StartError")), False),
        (pod(ended(143), meta=DELETED), False),
        (pod(ended(143), disrupted=EVICTION), False),
        (pod(ended(143), reason="NodeShutdown"), False),
        (pod(ended(143), reason="Evicted", message=EMPTY_DIR), False),
        (pod({"name": "trainer", "state": {"running": {}}}, phase="Running"), False),
        (init_failed(143), False),
    ],
)  # fmt: skip
def test_only_an_end_that_nothing_explains_is_asked_about(raw: dict[str, Any], asked: bool):
    assert classify.perhaps_probed(observe.pod(raw)) == asked


@pytest.mark.fault("N18")
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("code", [143, 137, 1])
def test_a_failed_probe_is_charged_and_told_in_its_words(replicas: int, code: int):
    world = fail(probed(replicas=replicas), 0, code)
    assert (world.counts, world.status["attempt"]) == ((1, 1, 0), 2)
    loss = world.loss
    assert (loss["class"], loss["reason"], loss["exitCode"]) == ("User", "ProbeFailed", code)
    assert loss["message"] == WORDS
    assert "ProbeFailed" in world.events[-1].message
    assert questions(world) == ["events of trainer in pod-1"]


def test_a_failed_probe_uses_up_the_budget_and_rules_meet_it():
    world = fail(probed(restart={"maxRestarts": 0}), 1)
    assert (world.phase, world.status["reason"]) == ("Failed", "MaxRestartsExceeded")
    rules = [{"reasons": ["ProbeFailed"], "action": "RestartFree"}]
    world = fail(probed(restart={"maxRestarts": 0, "rules": rules}), 1)
    assert (world.status["attempt"], world.counts) == (2, (1, 0, 1))


def test_the_time_to_start_does_not_end_while_the_question_is_open():
    world = World(job_object(template=template(startupProbe=PROBE), replicas=1)).settle()
    world.end(0, 143, settle=False).probed["pod-1"] = WORDS
    assert (world.wait(700).loss["reason"], world.counts[1]) == ("ProbeFailed", 1)


def test_peers_of_a_failed_probe_are_not_the_cause():
    loss = fail(probed().end(1, 75, settle=False), 2).loss
    assert (loss["replica"], loss["reason"]) == (2, "ProbeFailed")


@pytest.mark.fault("N18")
@pytest.mark.parametrize("replicas", [1, 3])
def test_without_proof_an_end_by_sigterm_is_a_disruption_as_before(replicas: int):
    world = fail(probed(replicas=replicas), 0, words="")
    if replicas > 1:
        assert world.phase == "Running", "the cause has its time to show itself"
        world.wait(6)
    assert (world.loss["class"], world.loss["reason"]) == ("Disruption", "SIGTERM")
    assert world.counts[1] == 0
    assert len(questions(world)) == 1, "one answer is enough"


@pytest.mark.parametrize("given", [{}, {"readinessProbe": PROBE}])
def test_who_has_no_probe_is_not_asked_about(given: dict[str, Any]):
    world = running(template=template(**given))
    fail(world, 0).wait(6)
    assert questions(world) == []
    assert world.loss["class"] == "Disruption"


@pytest.mark.parametrize("kind", ["livenessProbe", "startupProbe"])
def test_the_trainer_is_asked_about_by_its_name(kind: str):
    assert compact_spec.template(template("mine", **{kind: PROBE})).probed == "mine"


def test_of_a_gang_that_ends_at_a_signal_three_pods_are_asked_about():
    world = probed(replicas=8).all_end(143).settle()
    assert len(set(questions(world))) == len(questions(world)) == 3
    assert world.loss["class"] == "Disruption"
    assert questions(world.run().end(0, 143))[3:] == ["events of trainer in pod-9"], "of the next"


def test_the_question_is_asked_again_by_the_next_operator_and_only_of_what_is_not_stored():
    world = probed().end(0, 143, settle=False)
    assert world.plan().actions == (act.ReadEvents("pod-1", "trainer"),)
    world.restart_operator().settle().wait(6)
    assert world.status["attempt"] == 2
    assert questions(world.restart_operator().settle()) == ["events of trainer in pod-1"]
