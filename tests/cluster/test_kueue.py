"""The devcluster's Kueue: it admits a Job of a queue within the quota, and holds back the next."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import kueue
from support.cluster import CHECKOUT, wait_for
from support.sharing import Shared
from support.site import Site

pytestmark = [pytest.mark.root, pytest.mark.tier("all")]

NAMESPACE = "queued-jobs"


def job(name: str, seconds: int) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "devcluster/busybox:1",
        "command": ["sleep", str(seconds)],
        "resources": {"requests": {"cpu": "10m"}},
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {kueue.QUEUE_LABEL: "jobs"}},
        "spec": {"suspend": False, "template": {"spec": pod}},
    }


@pytest.fixture
def jobs(sites: Callable[[str], Site], shared: Shared) -> Iterator[Site]:
    """A namespace with a queue; no DDPJobs in it, so their invariants do not hold."""
    cluster = sites(f"t-{CHECKOUT}").cluster
    kueue.ensure(shared, cluster)
    found = Site(cluster, NAMESPACE)
    cluster.kubectl("create", "namespace", NAMESPACE, check=True)
    queue = kueue.queue("jobs", NAMESPACE, {"cpu": "10m"})
    found.apply(*queue)
    yield found
    for one in reversed(queue):
        found.kubectl("delete", one["kind"], one["metadata"]["name"], "--wait=false", check=True)
    found.kubectl("delete", "namespace", NAMESPACE, check=True)


def test_kueue_admits_a_job_once_another_has_freed_the_quota(jobs):
    jobs.apply(job("first", 1000))
    wait_for(lambda: jobs.get("job", "first")["status"].get("active"), "the first to be admitted")
    jobs.apply(job("second", 0))
    assert jobs.get("job", "second")["spec"]["suspend"], "Kueue's webhook suspends it"

    def told() -> str | None:
        """Why the second has no quota."""
        for workload in jobs.get("workloads.kueue.x-k8s.io")["items"]:
            if workload["metadata"]["ownerReferences"][0]["name"] == "second":
                conditions = workload.get("status", {}).get("conditions", [])
                return next((c["message"] for c in conditions if c["status"] == "False"), None)
        return None

    assert "insufficient unused quota" in wait_for(told, "Kueue to hold the second back")
    assert jobs.get("job", "second")["spec"]["suspend"]
    jobs.kubectl("delete", "job", "first", check=True)
    wait_for(lambda: jobs.get("job", "second")["status"].get("succeeded"), "the second to succeed")
