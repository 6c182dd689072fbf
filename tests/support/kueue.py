"""Kueue on a shared cluster, and the queues that tests fill. Whatever a test makes, it removes."""

from __future__ import annotations

from typing import Any

from support.cluster import Cluster
from support.sharing import Shared

API = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def ensure(run: Shared, cluster: Cluster) -> None:
    """Install Kueue in a cluster that the workers of a run share; once a run."""
    run.once(f"kueue-{cluster.name}", cluster.install_kueue)


def queue(
    name: str, namespace: str, quota: dict[str, str], node_labels: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """A queue of that name in a namespace, with a flavor and a cluster's queue to itself.

    ``quota`` is per resource, such as cpu; the names of what has no namespace are `name-namespace`.
    """
    whole = f"{name}-{namespace}"
    resources = [{"name": key, "nominalQuota": value} for key, value in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": whole, "resources": resources}]}
    return [
        {
            "apiVersion": API,
            "kind": "ResourceFlavor",
            "metadata": {"name": whole},
            "spec": {"nodeLabels": node_labels or {}},
        },
        {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": whole},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": whole},
        },
    ]
