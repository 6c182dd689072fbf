"""PodGroups on a real API server with the feature gates on: what is made, kept and removed.

How the scheduler places them is the business of tests/cluster/disruptive/test_gangs.py: here a hand
binds the pods.
"""

import secrets
from collections.abc import Iterator

import pytest

from ddpjob_operator.core.render import WHOLE_GROUP
from support import arena as support
from support import cluster, policy
from support.arena import Arena
from support.chart import operator_rules
from support.rest import Object, eventually
from support.sharing import Shared

GROUP = "/apis/scheduling.k8s.io"
NATIVE = {"gang": "Native", "topologyKey": "rack"}


@pytest.fixture(scope="module")
def gated(shared: Shared) -> cluster.Cluster:
    """A control plane of its own, with PodGroups."""

    def make(name: str) -> cluster.Cluster:
        plane = cluster.up(name, "--nodes", "0", "--gang-scheduling")
        plane.apply_crd()
        return plane

    run = shared.once("run", lambda: secrets.token_hex(3))
    return cluster.shared(shared, f"t-gang-{run}", make)


@pytest.fixture(scope="module")
def stage(gated: cluster.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with support.arena(gated.kubeconfig, tmp_path_factory.mktemp("gang")) as found:
        found.rights().give(operator_rules("--api-versions", "scheduling.k8s.io/v1alpha2/PodGroup"))
        policy.bind(gated, found.namespace, "operator")
        found.start_operator()
        yield found


def groups(stage: Arena, gang: str) -> dict[str, Object]:
    found = stage.rest.items(stage.path("podgroups", group=f"{GROUP}/{version(stage)}"))
    mine = [one for one in found if one["metadata"]["name"].startswith(f"{gang}-")]
    return {one["metadata"]["name"]: one for one in mine}


def version(stage: Arena) -> str:
    """The newest that serves PodGroups: DDPJOB_CONTROL_PLANE may be of another Kubernetes."""
    served = {one["version"] for one in stage.rest.get(GROUP)["versions"]}
    return next(one for one in WHOLE_GROUP if one in served)


def named(stage: Arena, gang: str) -> set[str]:
    """The groups that its pods name; "" for pods without one."""
    pods = stage.kubelet.pods(gang)
    return {(pod["spec"].get("schedulingGroup") or {}).get("podGroupName", "") for pod in pods}


def settles(stage: Arena) -> None:
    """Wait for a fixed point: reports of counts may follow a phase."""
    eventually("nothing is written", lambda: stage.quiet_resyncs() == [])


def test_each_attempt_has_its_group_and_none_outlives_the_job(stage, gang):
    stage.apply(gang, scheduling=NATIVE)
    first = stage.wait_phase(gang, "Running")["podGroup"]
    assert named(stage, gang) == {first}
    spec = groups(stage, gang)[first]["spec"]
    assert spec["schedulingPolicy"] == {"gang": {"minCount": 3}}
    assert spec["disruptionMode"] == WHOLE_GROUP[version(stage)]
    assert spec["schedulingConstraints"] == {"topology": [{"key": "rack"}]}
    settles(stage)

    stage.kubelet.finish(f"{gang}-1", 1)
    second = stage.wait_phase(gang, "Running", 2)["podGroup"]
    assert named(stage, gang) == {second} != {first}
    eventually("the first is gone", lambda: set(groups(stage, gang)) == {second})

    stage.rest.merge(stage.job_path(gang), {"spec": {"suspend": True}})
    stage.wait_status(gang, "no group", lambda s: s["phase"] == "Suspended" and "podGroup" not in s)
    eventually("the second is gone", lambda: groups(stage, gang) == {})
    settles(stage)

    stage.rest.merge(stage.job_path(gang), {"spec": {"suspend": False}})
    stage.wait_phase(gang, "Running", 3)
    stage.succeed(gang)
    eventually("the third is gone", lambda: groups(stage, gang) == {})
    stage.wait_status(gang, "no group", lambda s: "podGroup" not in s)
    settles(stage)
