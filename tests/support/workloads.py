"""Play Kueue: the Workloads of a test, and the words that v0.17's own code writes into them.

Pure functions on objects as the API server would hold them, so that unit tests, the model and the
api level (by PUT of the result) play the same part.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ddpjob_operator.core.objects import workload
from ddpjob_operator.core.objects.workload import Workload
from model.cluster import NAMESPACE, Cluster

Object = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
CLUSTER_QUEUE = "cq"


def stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(obj: Object, type_: str) -> Object:
    told = obj.get("status", {}).get("conditions", [])
    return next((one for one in told if one["type"] == type_), {})


def true(obj: Object, type_: str) -> bool:
    return bool(condition(obj, type_).get("status") == "True")


def tell(obj: Object, now: datetime, type_: str, value: bool, reason: str, message: str) -> Object:
    """Set a condition, in place."""
    status = obj.setdefault("status", {})
    told = [one for one in status.get("conditions", []) if one["type"] != type_]
    old, spelt = condition(obj, type_), "True" if value else "False"
    since = old["lastTransitionTime"] if old.get("status") == spelt else stamp(now)
    new = {"type": type_, "status": spelt, "reason": reason, "message": message}
    status["conditions"] = [*told, {**new, "lastTransitionTime": since}]
    return obj


def reserve(obj: Object, now: datetime, *flavors: str, **assigned: Any) -> Object:
    """Reserve quota, in flavours for cpu, memory, ..."""
    used = dict(zip(("cpu", "memory", "nvidia.com/gpu"), flavors or ("default",), strict=False))
    pod_set = {"name": "trainer", "flavors": used, "count": obj["spec"]["podSets"][0]["count"]}
    admission = {"clusterQueue": CLUSTER_QUEUE, "podSetAssignments": [{**pod_set, **assigned}]}
    obj.setdefault("status", {})["admission"] = admission
    said = f"Quota reserved in ClusterQueue {CLUSTER_QUEUE}"
    tell(obj, now, "QuotaReserved", True, "QuotaReserved", said)
    for type_ in ("Evicted", "Preempted"):
        if true(obj, type_):
            said = f"Previously: {condition(obj, type_)['message']}"
            tell(obj, now, type_, False, "QuotaReserved", said)
    return obj


def admit(obj: Object, now: datetime, *flavors: str, **assigned: Any) -> Object:
    reserve(obj, now, *flavors, **assigned)
    return tell(obj, now, "Admitted", True, "Admitted", "The workload is admitted")


def evict(obj: Object, now: datetime, reason: str = "Preempted") -> Object:
    message = f"Preempted to accommodate a workload (UID: x) due to {reason}"
    return tell(obj, now, "Evicted", True, reason, message)


def deactivate(obj: Object, now: datetime) -> Object:
    obj["spec"]["active"] = False
    return tell(obj, now, "Evicted", True, "Deactivated", "The workload is deactivated")


def pending(obj: Object, now: datetime, message: str = "couldn't assign flavors") -> Object:
    return tell(obj, now, "QuotaReserved", False, "Pending", message)


class Kueue:
    """The Workloads and flavours of a cluster."""

    cluster: Cluster

    def join(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.offer()
        cluster.create("workloadpriorityclasses", {"metadata": {"name": "high"}, "value": 100})

    def seen(self) -> tuple[Workload, ...]:
        return tuple(map(workload.workload, self.objects.values()))

    @property
    def objects(self) -> dict[str, Object]:
        there: Any = self.cluster.objects
        return {name: o for (plural, _, name), o in there.items() if plural == "workloads"}

    @property
    def only(self) -> Object:
        (found,) = self.objects.values()
        return found

    def offer(self, name: str = "default", **spec: Any) -> None:
        """Have a flavour, or change it."""
        body = {"metadata": {"name": name}, "spec": spec}
        self.cluster.objects["resourceflavors", NAMESPACE, name] = body

    def touch(self, obj: Object) -> None:
        """It has a new version."""
        self.cluster.touch(obj)
