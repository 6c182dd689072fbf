"""Native gang scheduling on the devcluster: the pods of a PodGroup are bound all, or none is."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support import cluster as support
from support.cluster import CHECKOUT, Cluster, wait_for

pytestmark = [pytest.mark.root, pytest.mark.tier("all")]

NAME = f"gangs-{CHECKOUT}"
GROUP = """
apiVersion: scheduling.k8s.io/v1alpha2
kind: PodGroup
metadata: {name: three}
spec: {schedulingPolicy: {gang: {minCount: 3}}}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: gangs}}
spec:
  %s
  tolerations: [{key: kwok.x-k8s.io/node, operator: Exists}]
  containers: [{name: main, image: none, resources: {limits: {nvidia.com/gpu: 5}}}]
"""
MEMBERS = [f"three-{number}" for number in range(3)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        yield support.up(NAME, "--nodes", "0", "--kwok", "2", "--gang-scheduling")
    finally:
        support.down(NAME)


def nodes(cluster: Cluster) -> dict[str, str | None]:
    """Return the node of each pod."""
    found = cluster.get("/api/v1/namespaces/default/pods?labelSelector=app%3Dgangs")
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in found["items"]}


def verdict(cluster: Cluster) -> str | None:
    """Return the scheduler's word on the group: True or False, None before it has looked."""
    path = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups/three"
    conditions: list[dict[str, Any]] = cluster.get(path).get("status", {}).get("conditions", [])
    return next((one["status"] for one in conditions if one["type"] == "PodGroupScheduled"), None)


def test_a_gang_is_bound_whole_or_not_at_all(cluster):
    cluster.kubectl("apply", "-f", "-", input=GROUP, check=True)
    for name in MEMBERS:  # each takes a node: of three pods two would fit
        member = POD % (name, "schedulingGroup: {podGroupName: three}")
        cluster.kubectl("apply", "-f", "-", input=member, check=True)
    wait_for(lambda: verdict(cluster) == "False", "the scheduler to find no room for three")
    assert nodes(cluster) == dict.fromkeys(MEMBERS)
    cluster.kubectl("apply", "-f", "-", input=POD % ("alone", ""), check=True)
    wait_for(lambda: nodes(cluster)["alone"], "a pod of no gang to take the room that is left")
    cluster.kubectl("delete", "pod", "alone", check=True)

    support.up(NAME, "--kwok", "3")  # the gates are kept
    wait_for(lambda: verdict(cluster) == "True", "the scheduler to find room for three")
    wait_for(lambda: all(nodes(cluster).values()), "all three to be bound")
    assert len(set(nodes(cluster).values())) == 3


def test_another_up_takes_the_api_away_and_brings_it_back(cluster):
    def served() -> bool:
        groups = cluster.kubectl("get", "podgroups", "-o", "json")
        return groups.returncode == 0 and bool(json.loads(groups.stdout)["items"])

    assert served()
    support.up(NAME, "--no-gang-scheduling")
    assert not served()
    support.up(NAME, "--gang-scheduling")
    assert served()
