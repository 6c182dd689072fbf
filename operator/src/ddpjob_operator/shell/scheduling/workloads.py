"""Carry out what concerns Kueue's Workload of a job, for shell/executor.py.

Every write is an update of what was just read, guarded by its resourceVersion, so that a field that
Kueue or another controller owns stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ddpjob_operator.core import ownership
from ddpjob_operator.core.actions import DeleteWorkload, EnsureWorkload, Existing, WriteWorkload
from ddpjob_operator.core.objects import workload
from ddpjob_operator.core.objects.json_read import mapping
from ddpjob_operator.core.objects.observe import KUEUE, Job
from ddpjob_operator.core.objects.workload import Placement
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import WORKLOADS, Api, Resource
from ddpjob_operator.shell.cache.store import Store

_FLAVORS = Resource(KUEUE, "v1beta2", "resourceflavors")
_WORKLOAD_CLASSES = Resource(KUEUE, "v1beta2", "workloadpriorityclasses")
_POD_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses")


async def ensure(
    api: Api, store: Store, job: Job, action: EnsureWorkload
) -> tuple[errors.ApiError, Existing | None] | None:
    """Create the Workload; return the refusal, if any."""
    name, wanted = action.body["metadata"]["name"], action.body["spec"]
    try:
        priority = await _priority(api, action)
        body = {**action.body, "spec": {**wanted, **priority}}
        # Not strict: Kueue's definition may know fewer fields of pods than the API server does.
        written = await api.create(WORKLOADS, job.namespace, body)
    except errors.ApiError as error:
        if error.reason != "AlreadyExists":
            return error, None
        written = await api.get(WORKLOADS, job.namespace, name)
        existing = ownership.existing("Workload", written)
        if existing.owner_uid != job.uid or existing.deleting:
            return error, existing
    store.workloads.put(written)
    return None


async def write(api: Api, store: Store, job: Job, action: WriteWorkload, now: datetime) -> bool:
    """Write conditions, or give the quota back; return False if it has changed meanwhile."""
    found = await api.get(WORKLOADS, job.namespace, action.name)
    fresh: bool = found["metadata"]["resourceVersion"] == action.version
    if fresh:
        body = workload.with_status(
            found, action.told, now, reclaimed=action.reclaimed, give_back=action.give_back
        )
        try:
            found = await api.replace(WORKLOADS, job.namespace, action.name, body, sub="status")
        except errors.Conflict:
            return False
    store.workloads.put(found)
    return fresh


async def delete(api: Api, store: Store, job: Job, action: DeleteWorkload) -> None:
    """Delete the Workload; one that is gone, or another one of that name, is left alone."""
    try:
        left = await api.delete(WORKLOADS, job.namespace, action.name, uid=action.uid)
    except (errors.NotFound, errors.Conflict):
        left = {}
    if left.get("kind") == "Workload" and left["metadata"].get("finalizers"):
        store.workloads.put(left)
    else:
        store.workloads.remove((job.namespace, action.name), action.uid, for_good=True)


async def flavors(api: Api, names: tuple[str, ...]) -> Mapping[str, Placement]:
    """Read what these ResourceFlavors ask of pods."""
    found = {name: await api.get(_FLAVORS, None, name) for name in names}
    return {name: workload.placement(mapping(one.get("spec"))) for name, one in found.items()}


async def _priority(api: Api, action: EnsureWorkload) -> dict[str, Any]:
    """Look up the priority: Kueue leaves that to who makes the Workload."""
    (pods,) = action.body["spec"]["podSets"]
    of_pods = pods["template"]["spec"].get("priorityClassName") or ""
    resource, kind = _WORKLOAD_CLASSES, "WorkloadPriorityClass"
    if not action.priority_class:
        resource, kind = _POD_CLASSES, "PriorityClass"
    name = action.priority_class or of_pods
    if not name:
        return {}
    found = await api.get(resource, None, name)
    reference = {"group": resource.group, "kind": kind, "name": name}
    return {"priorityClassRef": reference, "priority": found["value"]}
