"""What a gang's NetworkPolicy means: which pod may reach which of its ports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ddpjob_contract import crd
from ddpjob_operator.core import ownership, render
from ddpjob_operator.core.objects import observe, spec
from support.network import NAMESPACE, Pod, reaches
from support.world import job_object


def policy_of(*metrics_from: Mapping[str, Any]) -> tuple[Mapping[str, Any], Pod]:
    """The policy of a job and one of its pods."""
    obj = job_object()
    job, parsed = observe.job(obj), spec.read(obj["spec"])
    _, policy = render.network(job, parsed, metrics_from)
    made = render.pod(job, parsed, 1, 0)["metadata"]
    return policy, Pod(made["namespace"], made["labels"])


OPERATOR = Pod("ops", {"app": "operator"})
PROMETHEUS = Pod("monitoring", {"app": "prometheus"})
NEIGHBOUR = Pod("ns", {"app": "web"})
OTHER_GANG = Pod("ns", {crd.LABEL_JOB_UID: "another"})
ELSEWHERE = Pod("elsewhere", {crd.LABEL_JOB_UID: "uid-of-job"})
STRANGERS = [OPERATOR, PROMETHEUS, NEIGHBOUR, OTHER_GANG, ELSEWHERE]
PEERS = [
    {
        "namespaceSelector": {"matchLabels": {NAMESPACE: "ops"}},
        "podSelector": {"matchLabels": {"app": "operator"}},
    },
    {"namespaceSelector": {"matchLabels": {NAMESPACE: "monitoring"}}},
]


@pytest.mark.parametrize("port", [29500, 29501, 9400, 40000])
@pytest.mark.parametrize("peers", [[], PEERS])
def test_a_gang_reaches_itself_on_every_port(port: int, peers: list[Mapping[str, Any]]) -> None:
    policy, member = policy_of(*peers)
    assert reaches(policy, member, member, port)


@pytest.mark.parametrize("port", [29500, 29501, 40000])
@pytest.mark.parametrize("peers", [[], PEERS])
def test_nobody_else_reaches_a_port_of_training(port: int, peers: list[Mapping[str, Any]]) -> None:
    policy, member = policy_of(*peers)
    assert [p for p in STRANGERS if reaches(policy, p, member, port)] == []


def test_metrics_are_for_everybody_unless_peers_are_named() -> None:
    policy, member = policy_of()
    assert [p for p in STRANGERS if reaches(policy, p, member, 9400)] == STRANGERS
    policy, member = policy_of(*PEERS)
    assert [p for p in STRANGERS if reaches(policy, p, member, 9400)] == [OPERATOR, PROMETHEUS]


def test_a_pod_that_carries_the_label_is_let_in() -> None:
    """So who may label pods of the namespace may join: admissionPolicies.gangLabels."""
    policy, member = policy_of()
    assert reaches(policy, Pod("ns", {crd.LABEL_JOB_UID: "uid-of-job"}), member, 29500)


def test_other_pods_of_the_namespace_stay_as_open_as_they_were() -> None:
    policy, _ = policy_of()
    assert reaches(policy, PROMETHEUS, NEIGHBOUR, 80)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Service", lambda s: s["selector"].update(app="other")),
        ("NetworkPolicy", lambda s: s["podSelector"]["matchLabels"].update(app="other")),
        ("NetworkPolicy", lambda s: s["podSelector"].update(matchExpressions=[{"key": "x"}])),
        ("NetworkPolicy", lambda s: s["ingress"][0].update(ports=[{"port": 1}])),
        ("NetworkPolicy", lambda s: s["ingress"][0]["from"][0].update(namespaceSelector={})),
        ("NetworkPolicy", lambda s: s["ingress"][1].update({"from": [{"podSelector": {}}]})),
        ("NetworkPolicy", lambda s: s["ingress"].append({})),
    ],
)
def test_what_is_added_to_whom_it_selects_or_lets_in_is_taken_out(
    kind: str, change: Callable[[dict[str, Any]], None]
):
    """One more label and the Service has no pods; the gang would never meet again."""
    body = job_object()
    wanted = render.network(observe.job(body), spec.read(body["spec"]))
    ours = next(made for made in wanted if made["kind"] == kind)
    there: dict[str, Any] = copy.deepcopy({**ours, "status": {}})
    there["spec"]["ipFamilies"] = ["IPv4"]
    assert ownership.repaired(there, ours) is None
    change(there["spec"])
    mended = ownership.repaired(there, ours)
    assert mended
    assert mended["spec"] == {**ours["spec"], "ipFamilies": ["IPv4"]}
