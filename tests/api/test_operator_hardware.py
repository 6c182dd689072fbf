"""A GPU fails: what a real API server takes of the pods that are kept off its node."""

from __future__ import annotations

import json

import pytest

from support.arena import Arena
from support.rest import eventually


@pytest.mark.fault("N13")
def test_the_pods_of_the_next_attempt_are_kept_off_the_node(stage: Arena) -> None:
    stage.apply("gang")
    stage.wait_phase("gang", "Running")
    report = {"version": 1, "kind": "hardware", "code": 74, "exception": "CUDA error: ECC"}
    stage.kubelet.finish("gang-1", 74, json.dumps(report))
    status = stage.wait_phase("gang", "Running", attempt=2)
    node = stage.kubelet.node
    assert (status["lastFailure"]["class"], status["lastFailure"]["node"]) == ("Hardware", node)
    assert status["lastFailure"]["message"] == "CUDA error: ECC"
    assert (status["restarts"]["charged"], status["restarts"]["disruptions"]) == (0, 1)
    assert status["avoidedNodes"] == [node]
    field = {"key": "metadata.name", "operator": "NotIn", "values": [node]}
    wanted = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    for pod in stage.kubelet.pods("gang"):
        affinity = pod["spec"]["affinity"]["nodeAffinity"]
        assert affinity == {"requiredDuringSchedulingIgnoredDuringExecution": wanted}
    events = stage.path("events")
    eventually("an Event says so", lambda: "NodeAvoided" in str(stage.rest.items(events)))
    assert stage.quiet_resyncs() == [], "what is avoided costs no further write"
