"""A GPU fails: the attempt ends free of charge, and the next one is kept off its node."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob_contract import ExitCode
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from ddpjob_operator.core.objects import status as st
from support.world import World, job_object

BROKEN = int(ExitCode.HARDWARE)
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def running(**fields: Any) -> World:
    return World(job_object(**fields)).settle().run()


def lose(world: World, replica: int, code: int = BROKEN) -> World:
    """Its container ends so, and the gang comes back."""
    return world.end(replica, code).wait(20).run()


def kept_off(pod: dict[str, Any]) -> list[str]:
    """Nodes that no term of the pod's node affinity allows."""
    required = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {})
    terms = [
        {f["values"][0] for f in term.get("matchFields", ()) if f["operator"] == "NotIn"}
        for term in required.get("nodeSelectorTerms", ())
    ]
    return sorted(set.intersection(*terms)) if terms else []


def told(world: World, reason: str) -> list[str]:
    return [event.message for event in world.events if event.reason == reason]


@pytest.mark.fault("N13")
def test_a_broken_gpu_is_charged_to_nobody_and_its_node_is_avoided():
    world = lose(running(), 1)
    assert (world.phase, world.status["attempt"]) == ("Running", 2)
    restarts = world.status["restarts"]
    assert (restarts["charged"], restarts["disruptions"]) == (0, 1)
    failure = world.status["lastFailure"]
    assert (failure["class"], failure["node"], failure["exitCode"]) == ("Hardware", "node2", 74)
    assert world.status["avoidedNodes"] == ["node2"]
    assert {tuple(kept_off(pod)) for pod in world.pods.values()} == {("node2",)}
    (message,) = told(world, "NodeAvoided")
    assert message.startswith("a GPU of node2 failed")


@pytest.mark.parametrize("other", [1, ExitCode.HANG, ExitCode.DIVERGED, ExitCode.PEER_LOST, 137])
def test_a_broken_gpu_explains_what_befell_the_others(other: int):
    world = running()
    world.end(0, other, settle=False).end(1, BROKEN)
    assert world.status["lastFailure"]["class"] == "Hardware"
    assert world.status["restarts"]["charged"] == 0


def test_a_program_that_breaks_one_gpu_after_another_is_charged():
    world = running(restart={"maxRestarts": 1})
    for attempt in range(2, 5):
        lose(world, 1)
        assert (world.status["attempt"], world.status["restarts"]["charged"]) == (attempt, 0)
    lose(world, 1)
    assert world.status["restarts"]["charged"] == 1
    world.end(1, BROKEN)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "MaxRestartsExceeded"


def test_a_rule_of_the_user_comes_first():
    world = running(restart={"rules": [{"reasons": ["Hardware"], "action": "Fail"}]})
    world.end(1, BROKEN)
    assert (world.phase, world.condition("Failed")["reason"]) == ("Failed", "PermanentFailure")


def test_a_doubtful_node_is_better_than_none():
    world = running(startupDeadlineSeconds=60).end(1, BROKEN)
    assert world.phase == "Starting"
    for pod in world.pods.values():
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
            ],
        }
    world.wait(30)
    assert "kept off node2" in world.condition("Stalled")["message"]
    world.wait(31)
    assert (world.phase, world.status["restarts"]["charged"]) == ("Pending", 0)
    assert "avoidedNodes" not in world.status
    (message,) = told(world, "NodesTriedAgain")
    assert "node2" in message
    world.wait(600)
    assert all("affinity" not in pod["spec"] for pod in world.pods.values())


def test_who_suspends_and_resumes_gives_the_nodes_back():
    world = lose(running(), 1)
    world.patch(suspend=True).patch(suspend=False).run()
    assert world.phase == "Running"
    assert "avoidedNodes" not in world.status
    assert all("affinity" not in pod["spec"] for pod in world.pods.values())


def rendered(**pod_spec: Any) -> dict[str, Any]:
    obj = job_object(template={"spec": {"containers": [{"name": "trainer"}], **pod_spec}})
    return render.pod(observe.job(obj), spec.parse(obj["spec"]), 2, 0, ["a", "b"])


def test_the_templates_own_affinity_is_kept():
    wants = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
    fields = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["z"]}]}
    given = {
        "podAntiAffinity": {"x": 1},
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [1],
            REQUIRED: {"nodeSelectorTerms": [wants, fields, {}]},
        },
    }
    found = rendered(affinity=given)["spec"]["affinity"]
    assert found["podAntiAffinity"] == {"x": 1}
    assert found["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == [1]
    not_these = [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in "ab"]
    assert found["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {**wants, "matchFields": not_these},  # terms are alternatives
        {"matchFields": [*fields["matchFields"], *not_these]},
        {},  # matches nothing
    ]


def test_the_list_is_bounded_and_names_only_what_can_be_a_node():
    nodes = [f"n{number}" for number in range(20)]
    found = st.from_dict({"avoidedNodes": ["A b", "", 3, "x" * 300, "a..b", *nodes, "n19"]})
    assert found.avoided_nodes == tuple(nodes[-st.MAX_AVOIDED :])
    world = running()
    world.job["status"]["avoidedNodes"] = nodes[-st.MAX_AVOIDED :]
    lose(world, 1)
    assert world.status["avoidedNodes"] == [*nodes[-st.MAX_AVOIDED + 1 :], "node2"]
