"""Render the PodGroup of an attempt, by which Kubernetes places all of its pods or none.

capacity/pod_group.py decides whether an attempt has one; plan() puts it into EnsureNetwork before
the first pod. The API is younger than we are: its field for preemption is spelt by version. Pods
that stand by belong to no group: nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddpjob_contract import crd
from ddpjob_operator.core import render
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.objects.spec import Spec

KIND: Final = "PodGroup"
GROUP: Final = "scheduling.k8s.io"
#: Versions, the newest first, and how each says that preemption takes the whole group.
WHOLE: Final[Mapping[str, Any]] = {
    "v1beta1": {"all": {}},  # Kubernetes 1.37
    "v1alpha2": "PodGroup",  # 1.36
}


def name(job: Job, attempt: int) -> str:
    """Return the name of the PodGroup of an attempt; with the uid in it no other job has it."""
    return f"{job.name}-{job.uid[:8]}-{attempt}"


def body(job: Job, spec: Spec, attempt: int, version: str) -> dict[str, Any]:
    """Render the PodGroup of an attempt in the words of that version of the API."""
    wanted: dict[str, Any] = {
        "schedulingPolicy": {"gang": {"minCount": spec.replicas}},
        "disruptionMode": WHOLE[version],
    }
    if spec.scheduling.priority:
        wanted["priorityClassName"] = spec.scheduling.priority
    if spec.scheduling.topology_key:
        wanted["schedulingConstraints"] = {"topology": [{"key": spec.scheduling.topology_key}]}
    meta = render.meta(job)
    # Its protection outlives pods that end slowly: it must not hold up a job's deletion.
    owner = {**meta["ownerReferences"][0], "blockOwnerDeletion": False}
    meta |= {"name": name(job, attempt), "ownerReferences": [owner]}
    meta["labels"] = {**meta["labels"], crd.LABEL_ATTEMPT: str(attempt)}
    return {"apiVersion": f"{GROUP}/{version}", "kind": KIND, "metadata": meta, "spec": wanted}
