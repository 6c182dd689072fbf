"""DDPJobs and Pods as an API server has them, with as much as the operator's shell reads."""

from __future__ import annotations

from typing import Any

from ddpjob_contract.crd import LABEL_ATTEMPT, LABEL_REPLICA

Object = dict[str, Any]


def job(version: int | str = 1, uid: str = "u1", name: str = "job", **status: Any) -> Object:
    meta = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}, "status": status}


def pod(
    uid: str,
    /,
    replica: int | None = 0,
    attempt: int | None = 1,
    *,
    version: int | str = 10,
    owner: str = "u1",
    status: Object | None = None,
    **meta: Any,
) -> Object:
    """``meta``: other fields of its metadata, or the same once more."""
    given = {
        "namespace": "ns",
        "name": f"job-{replica}",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {LABEL_ATTEMPT: str(attempt), LABEL_REPLICA: str(replica)},
        "ownerReferences": [{"controller": True, "uid": owner}],
    }
    spec = {"containers": [{"name": "trainer"}]}
    return {"kind": "Pod", "metadata": given | meta, "spec": spec, "status": status or {}}
