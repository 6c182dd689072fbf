"""What a gang's NetworkPolicy means: which pod may reach which of its ports."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from ddpjob_contract import crd
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from support.network import NAMESPACE, Pod, reaches
from support.world import job_object


def policy_of(*metrics_from: Mapping[str, Any]) -> tuple[Mapping[str, Any], Pod]:
    """The policy of a job and one of its pods."""
    obj = job_object()
    job, parsed = observe.job(obj), spec.read(obj["spec"])
    *_, policy = render.network(job, parsed, metrics_from)
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


@pytest.mark.parametrize("peers", [[], PEERS])
def test_nobody_else_reaches_a_port_of_training(peers):
    policy, member = policy_of(*peers)
    for port in (29500, 29501, 9400, 40000):
        everybody = [OPERATOR, PROMETHEUS] if peers else STRANGERS
        found = [pod for pod in (member, *STRANGERS) if reaches(policy, pod, member, port)]
        assert found == [member, *(everybody if port == 9400 else [])]
    # Who may label pods of the namespace may join: admissionPolicies.gangLabels.
    assert reaches(policy, Pod("ns", {crd.LABEL_JOB_UID: "uid-of-job"}), member, 29500)
    assert reaches(policy, PROMETHEUS, NEIGHBOUR, 80), "other pods stay as open as they were"


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
def test_what_is_added_to_whom_it_selects_or_lets_in_is_taken_out(kind, change):
    """One more label and the Service has no pods; the gang would never meet again."""
    body = job_object()
    wanted = render.network(observe.job(body), spec.read(body["spec"]))
    ours = next(made for made in wanted if made["kind"] == kind)
    there: dict[str, Any] = copy.deepcopy({**ours, "status": {}})
    there["spec"]["ipFamilies"] = ["IPv4"]
    assert render.repaired(there, ours) is None
    change(there["spec"])
    mended = render.repaired(there, ours)
    assert mended
    assert mended["spec"] == {**ours["spec"], "ipFamilies": ["IPv4"]}
