"""manifests/examples/gpu-check.yaml, on nodes that say they have GPUs and have none.

A stand-in: the resource is written into the nodes' status, as a device plugin would do. Scheduling,
one pod per node and what a person is told are real; the checks themselves need GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support.cluster import wait_for
from support.manifest import example
from support.site import Site

pytestmark = pytest.mark.tier("all")

GPUS = "nvidia.com/gpu"
_AT = "/status/{}/nvidia.com~1gpu"


@pytest.fixture
def nodes_with_gpus(site: Site) -> Iterator[list[str]]:
    nodes = sorted(node["metadata"]["name"] for node in site.get("nodes")["items"])
    places = ("capacity", "allocatable")
    for node in nodes:
        _patch(site, node, [{"op": "add", "path": _AT.format(at), "value": "8"} for at in places])
    yield nodes
    for node in nodes:
        _patch(site, node, [{"op": "remove", "path": _AT.format(at)} for at in places])


def _patch(site: Site, node: str, changes: list[dict[str, str]]) -> None:
    patch = ("patch", "node", node, "--subresource=status", "--type=json", "-p")
    site.kubectl(*patch, json.dumps(changes), check=True)


def test_who_has_no_driver_is_told_so(site: Site, nodes_with_gpus: list[str]) -> None:
    (job,) = example("gpu-check.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"][GPUS] == 8
    container["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    # The first to fail ends the job and the others' pods with it: none starts before all are bound.
    gate = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpu-check-gate"}}
    mount = {"name": "gate", "configMap": {"name": "gpu-check-gate"}}
    job["spec"]["template"]["spec"]["volumes"] = [mount]
    site.apply(job)
    try:
        wait_for(lambda: _nodes(site) == nodes_with_gpus or None, "a pod on every node")
        site.apply(gate)
        status = site.wait_phase("gpu-check", "Failed")
        failure = status["lastFailure"]
        assert (failure["exitCode"], failure["class"]) == (64, "Permanent")
        assert "GPU" in failure["message"]
        assert status["restarts"]["total"] == 0
    finally:
        site.delete("gpu-check")
        site.kubectl("delete", "configmap", "gpu-check-gate", "--ignore-not-found", check=True)


def _nodes(site: Site) -> list[str]:
    return sorted(pod["spec"].get("nodeName", "") for pod in site.pods("gpu-check").values())
