"""What a NetworkPolicy means: a small evaluator of ingress rules stands in for a network plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, "the evaluator knows no more"
    return dict(selector.get("matchLabels", {})).items() <= dict(labels).items()


def is_peer(peer: Mapping[str, Any], source: Pod, home: str) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector"}, "the evaluator knows no more"
    wanted = peer.get("namespaceSelector")
    near = source.namespace == home
    there = near if wanted is None else selects(wanted, {NAMESPACE: source.namespace})
    return there and selects(peer.get("podSelector", {}), source.labels)


def reaches(policy: Mapping[str, Any], source: Pod, target: Pod, port: int) -> bool:
    """As a plugin that enforces policies would let a TCP connection through."""
    home, body = policy["metadata"]["namespace"], policy["spec"]
    if target.namespace != home or not selects(body["podSelector"], target.labels):
        return True
    assert body["policyTypes"] == ["Ingress"]
    return any(
        ("from" not in rule or any(is_peer(peer, source, home) for peer in rule["from"]))
        and (
            "ports" not in rule
            or any((p["protocol"], p["port"]) == ("TCP", port) for p in rule["ports"])
        )
        for rule in body["ingress"]
    )
