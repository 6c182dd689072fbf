"""Fake nodes for scale: Node objects that KWOK keeps Ready, and whose pods it plays.

They carry a taint, so that only pods that ask for it (toleration `kwok.x-k8s.io/node`) land there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from devcluster.api import Api
from devcluster.layout import Layout

_STAGES = Path(__file__).resolve().parents[2] / "kwok" / "stages.yaml"
_MARK = "kwok.x-k8s.io/node"
_NODES = "/api/v1/nodes"


def arguments(layout: Layout) -> list[str]:
    """Return the arguments of kwok: it renews leases before the controller manager looks."""
    return [
        f"--kubeconfig={layout.kubeconfig}",
        f"--config={_STAGES}",
        f"--manage-nodes-with-annotation-selector={_MARK}=fake",
        "--node-lease-duration-seconds=20",
        f"--server-address={layout.loopback}:10247",
    ]


def node(number: int) -> dict[str, Any]:
    """Return fake node ``number``, with room for many pods and GPUs."""
    room = {"cpu": "128", "memory": "2Ti", "pods": "1000", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"kwok{number}",
            "annotations": {_MARK: "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": f"kwok{number}"},
        },
        "spec": {"taints": [{"key": _MARK, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }


def ensure_nodes(api: Api, count: int) -> None:
    """Have exactly ``count`` fake nodes."""
    listed = api.items(f"{_NODES}?labelSelector=type%3Dkwok")
    present = {found["metadata"]["name"] for found in listed}
    wanted = {f"kwok{number}": number for number in range(1, count + 1)}
    for name in present - wanted.keys():
        api.delete(f"{_NODES}/{name}")
    for name in sorted(wanted.keys() - present):
        api.ensure(_NODES, node(wanted[name]))
