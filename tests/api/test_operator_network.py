"""The NetworkPolicy of a gang on a real API server: what was changed or deleted comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.arena import Arena, arena
from support.cluster import Cluster
from support.rest import Object, eventually

PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


@pytest.fixture
def stage(control_plane: Cluster, tmp_path: Path) -> Iterator[Arena]:
    with arena(control_plane.kubeconfig, tmp_path) as found:
        found.start_operator("--metrics-from", json.dumps([PEER]))
        yield found


def test_a_policy_that_was_changed_or_deleted_is_put_right(stage: Arena) -> None:
    stage.apply("gang", restart={"backoff": {"maxSeconds": 1}})
    stage.wait_phase("gang", "Running", 1)
    path = stage.path("networkpolicies", "gang", "/apis/networking.k8s.io/v1")
    ours: Object = stage.rest.get(path)["spec"]
    assert ours["ingress"][1]["from"] == [PEER]
    stage.rest.merge(path, {"spec": {"ingress": [{}]}})
    stage.kubelet.finish("gang-1", 1)
    stage.wait_phase("gang", "Running", 2)
    assert stage.rest.get(path)["spec"] == ours
    events = stage.path("events")
    eventually("an event tells of it", lambda: "NetworkRepaired" in str(stage.rest.get(events)))
    stage.rest.delete(path)
    stage.kubelet.finish("gang-1", 1)
    stage.wait_phase("gang", "Running", 3)
    assert stage.rest.get(path)["spec"] == ours
