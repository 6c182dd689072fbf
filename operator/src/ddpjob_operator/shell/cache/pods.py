"""Keep slim records of pods; find those that no watch shows.

The informer and the executor call it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core import ownership
from ddpjob_operator.core.actions import Existing
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api.client import PODS, Api

log = logging.getLogger(__name__)

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlimPod:
    """The kept part of a pod, and its resourceVersion."""

    pod: observe.Pod
    version: int | None
    readable: bool = True


def slim_pod(obj: Object) -> SlimPod:
    """Keep the needed part of a Pod object; a malformed one must hide no other."""
    meta, readable = obj["metadata"], True
    try:
        pod = observe.pod(obj)
    except Exception:
        log.exception("a pod that cannot be read is ignored")
        named = {field: meta[field] for field in ("namespace", "name", "uid")}
        pod, readable = observe.pod({"metadata": named}), False
    return SlimPod(pod, number(meta.get("resourceVersion")), readable)


async def hidden_pods(api: Api, job: observe.Job) -> tuple[Existing, ...]:
    """Find pods of the job that lost the label of its uid. Raises ApiError."""
    named = f"{crd.LABEL_JOB_NAME}={job.name}"
    keep = partial(ownership.hidden, job_uid=job.uid)
    listing = await api.list_all(PODS, job.namespace, named, keep=keep)
    return tuple(filter(None, listing.items))


def number(version: object) -> int | None:
    """Return a resourceVersion as a number, to be compared; None if it is none."""
    return int(version) if isinstance(version, str) and version.isdecimal() else None
