"""Make and remove PodGroups, and compare what the API server keeps of them with what was sent.

executor.py calls it. The API server drops the fields of disabled feature gates without a word, so
only its answer shows whether a group will be placed as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddpjob_contract import crd
from ddpjob_operator.core import ownership
from ddpjob_operator.core.actions import Body, RemoveGroups
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.pod_groups import GROUP
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import PODGROUPS, Api, Object, Resource

#: Of a pod.
_FIELD: Final = "schedulingGroup"
#: In a 403 that is about this group alone: pods would meet the same, or it passes.
_OF_THIS_GROUP: Final = ("exceeded quota", "no PriorityClass", "admission webhook")


async def ensure(api: Api, job: observe.Job, body: Body) -> Object:
    """Return the PodGroup as the API server has it, made if it was missing. Raises ApiError."""
    resource = Resource(GROUP, body["apiVersion"].rpartition("/")[2], PODGROUPS)
    try:
        return await api.get(resource, job.namespace, body["metadata"]["name"])
    except errors.NotFound:
        return await api.create(resource, job.namespace, body, strict=True)


async def remove(api: Api, job: observe.Job, action: RemoveGroups) -> None:
    """Delete the job's PodGroups up to this one; without API or right there is none.

    The protection of a PodGroup keeps it until its pods have ended. Newer ones stay: this operator
    may be deposed by now. Raises ApiError.
    """
    if not action.version:
        return
    newest = action.name.rpartition("-")[2]
    resource = Resource(GROUP, action.version, PODGROUPS)
    try:
        listing = await api.list_all(resource, job.namespace, f"{crd.LABEL_JOB_UID}={job.uid}")
        for found in (ownership.existing("PodGroup", one) for one in listing.items):
            newer = newest.isdecimal() and (found.attempt or 0) > int(newest)
            if found.owner_uid == job.uid and not (found.deleting or newer):
                await _delete(api, resource, job, found.name, found.uid)
    except (errors.NotFound, errors.Forbidden):
        return
    except errors.ApiError as error:  # seen: a 429, for ever
        if "is registered for version" not in error.message:
            raise
        # Left in etcd by an older Kubernetes, in a version that this one cannot read.


async def _delete(api: Api, resource: Resource, job: observe.Job, name: str, uid: str) -> None:
    try:
        await api.delete(resource, job.namespace, name, uid=uid)
    except (errors.NotFound, errors.Conflict):
        return  # gone, or another of that name: the next look tells


def unavailable(error: errors.ApiError) -> bool:
    """Tell a missing API or right from a refusal of this group, such as a quota's."""
    if not isinstance(error, errors.NotFound | errors.Forbidden | errors.Invalid):
        return False
    return not any(words in error.message for words in _OF_THIS_GROUP)


def dropped(found: Object, sent: Body) -> str:
    """Name the fields of a PodGroup that the API server has not kept; "" if it has all."""
    kept: Mapping[str, Any] = found.get("spec") or {}
    lost = [field for field, value in sent["spec"].items() if kept.get(field) != value]
    return f"the API server drops {_listed(lost)} of PodGroups: a feature gate is off" * bool(lost)


def dropped_of(pod: Object, sent: Body) -> str:
    """Say that the API server has not kept a pod's group; "" if it has."""
    asked, kept = ((one.get("spec") or {}).get(_FIELD) for one in (sent, pod))
    if kept == asked:
        return ""
    return f"the API server drops spec.{_FIELD} of pods: a feature gate is off"


def _listed(fields: list[str]) -> str:
    return ", ".join(f"spec.{field}" for field in fields)
