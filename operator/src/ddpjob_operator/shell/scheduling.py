"""Carry out what schedulers need beside the pods: PodGroups, and Workloads of Kueue.

executor.py calls it. The API server drops the fields of disabled feature gates without a word, so
only its answer shows whether a PodGroup will be placed as a whole. Every write of a Workload is an
update of what was just read, guarded by its resourceVersion, so that a field that Kueue or another
controller owns stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from ddpjob_contract import crd
from ddpjob_operator.core import actions
from ddpjob_operator.core.objects import observe, workload
from ddpjob_operator.core.objects.json_read import mapping
from ddpjob_operator.core.objects.observe import KUEUE, Job
from ddpjob_operator.core.objects.workload import Placement
from ddpjob_operator.core.render import GROUP_API, WHOLE_GROUP
from ddpjob_operator.shell.api import (
    PODGROUPS,
    WORKLOADS,
    Api,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Object,
    Resource,
    find,
)
from ddpjob_operator.shell.store import Store

log = logging.getLogger(__name__)

#: Of a pod.
_FIELD: Final = "schedulingGroup"
#: In a 403 that is about this group alone: pods would meet the same, or it passes.
_OF_THIS_GROUP: Final = ("exceeded quota", "no PriorityClass", "admission webhook")


async def ensure_group(api: Api, job: Job, body: actions.Body) -> Object:
    """Return the PodGroup as the API server has it, made if it was missing. Raises ApiError."""
    resource = Resource(GROUP_API, body["apiVersion"].rpartition("/")[2], PODGROUPS)
    found = await find(api, resource, job.namespace, body["metadata"]["name"])
    return found or await api.create(resource, job.namespace, body, strict=True)


async def remove_groups(api: Api, job: Job, action: actions.RemoveGroups) -> None:
    """Delete the job's PodGroups up to this one; without API or right there is none.

    The protection of a PodGroup keeps it until its pods have ended. Newer ones stay: this operator
    may be deposed by now. Raises ApiError.
    """
    if not action.version:
        return
    newest = action.name.rpartition("-")[2]
    resource = Resource(GROUP_API, action.version, PODGROUPS)
    try:
        listing = await api.list_all(resource, job.namespace, f"{crd.LABEL_JOB_UID}={job.uid}")
        for found in (observe.existing("PodGroup", one) for one in listing.items):
            newer = newest.isdecimal() and (found.attempt or 0) > int(newest)
            if found.owner_uid == job.uid and not (found.deleting or newer):
                # Gone meanwhile, or another of that name: the next look shows which.
                with contextlib.suppress(NotFound, Conflict):
                    await api.delete(resource, job.namespace, found.name, uid=found.uid)
    except (NotFound, Forbidden):
        return
    except ApiError as error:  # seen: a 429, for ever
        if "is registered for version" not in error.message:
            raise
        # Left in etcd by an older Kubernetes, in a version that this one cannot read.


def no_groups(error: ApiError) -> bool:
    """Return True if the API or the right is missing; False if this group alone is refused."""
    if not isinstance(error, NotFound | Forbidden | Invalid):
        return False
    return not any(words in error.message for words in _OF_THIS_GROUP)


def dropped(found: Object, sent: actions.Body) -> str:
    """Name the fields of a PodGroup that the API server has not kept; "" if it has all."""
    kept: Mapping[str, Any] = found.get("spec") or {}
    lost = [f"spec.{field}" for field, value in sent["spec"].items() if kept.get(field) != value]
    what = f"the API server drops {', '.join(lost)} of PodGroups: a feature gate is off"
    return what if lost else ""


def dropped_of(pod: Object, sent: actions.Body) -> str:
    """Say that the API server has not kept a pod's group; "" if it has."""
    asked, kept = ((one.get("spec") or {}).get(_FIELD) for one in (sent, pod))
    what = f"the API server drops spec.{_FIELD} of pods: a feature gate is off"
    return "" if kept == asked else what


_FLAVORS = Resource(KUEUE, "v1beta2", "resourceflavors")
_WORKLOAD_CLASSES = Resource(KUEUE, "v1beta2", "workloadpriorityclasses")
_POD_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses")


async def ensure_workload(
    api: Api, store: Store, job: Job, action: actions.EnsureWorkload
) -> tuple[ApiError, observe.Existing | None] | None:
    """Create the Workload; return the refusal, if any."""
    name, wanted = action.body["metadata"]["name"], action.body["spec"]
    try:
        priority = await _priority(api, action)
        body = {**action.body, "spec": {**wanted, **priority}}
        # Not strict: Kueue's definition may know fewer fields of pods than the API server does.
        written = await api.create(WORKLOADS, job.namespace, body)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            return error, None
        written = await api.get(WORKLOADS, job.namespace, name)
        existing = observe.existing("Workload", written)
        if existing.owner_uid != job.uid or existing.deleting:
            return error, existing
    store.workloads.put(written)
    return None


async def write_workload(
    api: Api,
    store: Store,
    job: Job,
    action: actions.WriteWorkload | actions.ReadWorkload,
    now: datetime,
) -> bool:
    """Read the Workload and do what is asked; return False if it has changed, or is gone."""
    found = await find(api, WORKLOADS, job.namespace, action.name)
    if found is None:
        for gone in store.workloads.of(job) or ():
            store.workloads.remove((gone.namespace, gone.name), gone.uid, for_good=True)
        return False
    fresh: bool = found["metadata"]["resourceVersion"] == action.version
    if fresh and isinstance(action, actions.WriteWorkload):
        body = workload.with_status(
            found, action.conditions, now, reclaimed=action.reclaimed, give_back=action.give_back
        )
        try:
            found = await api.replace(WORKLOADS, job.namespace, action.name, body, sub="status")
        except Conflict:
            return False
    store.workloads.put(found)
    return fresh


async def delete_workload(api: Api, store: Store, job: Job, action: actions.DeleteWorkload) -> None:
    """Delete the Workload; one that is gone, or another one of that name, is left alone."""
    try:
        left = await api.delete(WORKLOADS, job.namespace, action.name, uid=action.uid)
    except (NotFound, Conflict):
        left = {}
    if left.get("kind") == "Workload" and left["metadata"].get("finalizers"):
        store.workloads.put(left)
    else:
        store.workloads.remove((job.namespace, action.name), action.uid, for_good=True)


async def read_flavors(api: Api, names: tuple[str, ...]) -> Mapping[str, Placement]:
    """Read what these ResourceFlavors ask of pods."""
    found = {name: await api.get(_FLAVORS, None, name) for name in names}
    return {name: workload.placement(mapping(one.get("spec"))) for name, one in found.items()}


async def _priority(api: Api, action: actions.EnsureWorkload) -> dict[str, Any]:
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


_EVERY = 60.0
_RETRY = 2.0


class GangApi:
    """Finds out which ``version`` of scheduling.k8s.io serves PodGroups; "": none.

    An administrator may switch the API on or off while the operator runs: then ``changed()`` is
    called, and all jobs are looked at. ``answered`` is set once the version is known.
    """

    def __init__(self, api: Api, changed: Callable[[], None], seconds: float = _EVERY) -> None:
        self._api, self._changed, self._seconds = api, changed, seconds
        self.version = ""
        self.answered = asyncio.Event()

    async def run(self) -> None:
        """Ask until cancelled; while the API server does not answer, keep what it said last."""
        while True:
            delay = _RETRY
            with contextlib.suppress(ApiError):  # others log that it is away
                found = await self._find()
                delay = self._seconds
                if found != self.version:
                    log.info("PodGroups: %s", f"{GROUP_API}/{found}" if found else "not served now")
                    self.version = found
                    self._changed()
                self.answered.set()
            await asyncio.sleep(delay)

    async def _find(self) -> str:
        try:
            groups = (await self._api.discover("/apis")).get("groups", ())
        except Forbidden:
            return ""  # by an administrator, who has taken the binding of system:discovery away
        versions = (one["versions"] for one in groups if one["name"] == GROUP_API)
        served = {one["version"] for one in next(versions, ())}
        for version in WHOLE_GROUP:
            if version not in served:
                continue
            kinds = await self._api.discover(f"/apis/{GROUP_API}/{version}")
            if any(one["name"] == PODGROUPS for one in kinds.get("resources", ())):
                return version
        return ""
