"""A GPU fails: the attempt ends free of charge, and the next one is kept off its node."""

from typing import Any

import pytest

from ddpjob_contract import ExitCode
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from ddpjob_operator.core.objects import status as st
from support.world import World, job_object, kept_off, running

BROKEN = int(ExitCode.HARDWARE)
NODES = [f"n{number}" for number in range(20)]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def lose(world: World, replica: int, code: int = BROKEN) -> World:
    """Its container ends so, and the gang comes back."""
    return world.end(replica, code).wait(20).run()


@pytest.mark.fault("N13")
def test_a_broken_gpu_is_charged_to_nobody_and_its_node_is_avoided():
    world = running()
    world.job["status"]["avoidedNodes"] = NODES[-st.MAX_AVOIDED :]
    lose(world, 1)
    assert (world.phase, world.status["attempt"]) == ("Running", 2)
    loss = world.loss
    assert (loss["class"], loss["node"], loss["exitCode"]) == ("Hardware", "node2", 74)
    assert world.counts == (1, 0, 1)
    avoided = [*NODES[-st.MAX_AVOIDED + 1 :], "node2"]
    assert world.status["avoidedNodes"] == avoided, "bounded"
    assert {tuple(kept_off(pod)) for pod in world.pods.values()} == {tuple(sorted(avoided))}
    (message,) = world.told("NodeAvoided")
    assert message.startswith("a GPU of node2 failed")


@pytest.mark.parametrize("other", [1, ExitCode.HANG, ExitCode.DIVERGED, ExitCode.PEER_LOST, 137])
def test_a_broken_gpu_explains_what_befell_the_others(other):
    world = running().end(0, other, settle=False).end(1, BROKEN)
    assert (world.loss["class"], world.counts[1]) == ("Hardware", 0)


def test_a_program_that_breaks_one_gpu_after_another_is_charged():
    world = running(restart={"maxRestarts": 1})
    for attempt in range(2, 5):
        lose(world, 1)
        assert (world.status["attempt"], world.counts[1]) == (attempt, 0)
    lose(world, 1)
    assert world.counts[1] == 1
    assert world.end(1, BROKEN).status["reason"] == "MaxRestartsExceeded"
    rules = [{"reasons": ["Hardware"], "action": "Fail"}]  # a rule of the user comes first
    assert running(restart={"rules": rules}).end(1, BROKEN).status["reason"] == "PermanentFailure"


def test_a_doubtful_node_is_better_than_none():
    world = running(startupDeadlineSeconds=60).end(1, BROKEN)
    assert world.phase == "Starting"
    no_room = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    for pod in world.pods.values():
        pod["status"] = {"phase": "Pending", "conditions": [no_room]}
    world.wait(30)
    assert "kept off node2" in world.condition("Stalled")["message"]
    world.wait(31)
    assert (world.phase, world.counts[1]) == ("Pending", 0)
    assert "avoidedNodes" not in world.status
    (message,) = world.told("NodesTriedAgain")
    assert "node2" in message
    world.wait(600)
    assert all("affinity" not in pod["spec"] for pod in world.pods.values())


def test_who_suspends_and_resumes_gives_the_nodes_back():
    world = lose(running(), 1).patch(suspend=True).patch(suspend=False).run()
    assert world.phase == "Running"
    assert "avoidedNodes" not in world.status
    assert all("affinity" not in pod["spec"] for pod in world.pods.values())


def test_the_templates_own_affinity_is_kept():
    wants = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
    fields = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["z"]}]}
    rather = "preferredDuringSchedulingIgnoredDuringExecution"
    required = {"nodeSelectorTerms": [wants, fields, {}]}
    given = {"podAntiAffinity": {"x": 1}, "nodeAffinity": {rather: [1], REQUIRED: required}}
    job = job_object(template={"spec": {"containers": [{"name": "trainer"}], "affinity": given}})
    parsed = spec.parse(job["spec"])
    pod = render.pod(observe.job(job), parsed, 1, 0, ["a", "b"], suspected=["c"])
    found = pod["spec"]["affinity"]
    not_these = [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in "abc"]
    assert found["podAntiAffinity"] == {"x": 1}
    wish = {"weight": 100, "preference": {"matchFields": not_these[2:]}}
    assert found["nodeAffinity"][rather] == [1, wish]
    assert (
        found["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
        == [
            {**wants, "matchFields": not_these[:2]},  # terms are alternatives
            {"matchFields": [*fields["matchFields"], *not_these[:2]]},
            {},  # matches nothing
        ]
    )


def test_the_list_names_only_what_can_be_a_node():
    found = st.from_dict({"avoidedNodes": ["A b", "", 3, "x" * 300, "a..b", *NODES, "n19"]})
    assert found.avoided_nodes == tuple(NODES[-st.MAX_AVOIDED :])


def rather_off(pod: dict[str, Any]) -> list[str]:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    assert all(term["weight"] == 100 for term in terms)
    return [term["preference"]["matchFields"][0]["values"][0] for term in terms]


def test_a_node_where_failures_repeat_is_avoided_while_there_is_a_choice():
    """Replica 1 is on node2, the others on node1."""
    world = running(restart={"maxRestarts": 20})
    for replica, nodes in ((1, []), (0, []), (1, ["node2"]), (0, ["node1", "node2"])):
        lose(world, replica, 137).wait(400)
        assert [rather_off(pod) for pod in world.pods.values()] == [nodes] * 3
    for _ in range(2):
        lose(world, 1, 1).wait(400)
    assert rather_off(world.pods["job-0"]) == ["node1", "node2"]
    assert rather_off(lose(world, 1, 1).pods["job-0"]) == ["node2"], "of the last five"
    world.patch(suspend=True).patch(suspend=False)
    assert rather_off(world.pods["job-0"]) == [], "it may have been mended"


def test_the_removal_of_pods_says_nothing_of_their_node():
    world = running()
    for _ in range(3):
        world.vanish(1).wait(400).run()
    assert rather_off(world.pods["job-1"]) == []
