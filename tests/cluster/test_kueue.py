"""The devcluster's Kueue: it admits a Job of a queue within the quota, and holds back the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import kueue
from support.cluster import wait_for
from support.sharing import Shared
from support.site import Site

pytestmark = [pytest.mark.root, pytest.mark.tier("all")]

QUEUE = "jobs"


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
        "metadata": {"name": name, "labels": {kueue.QUEUE_LABEL: QUEUE}},
        "spec": {"suspend": False, "template": {"spec": pod}},
    }


@pytest.fixture
def queue(site: Site, shared: Shared) -> Iterator[None]:
    kueue.ensure(shared, site.cluster)
    objects = kueue.queue(QUEUE, site.namespace, {"cpu": "10m"})
    site.apply(*objects)
    yield
    site.kubectl("delete", "jobs", "--all", check=True)
    for one in reversed(objects):
        site.kubectl("delete", one["kind"], one["metadata"]["name"], check=True)


def test_kueue_admits_a_job_once_another_has_freed_the_quota(site: Site, queue: None) -> None:
    site.apply(job("first", 1000))
    wait_for(lambda: site.get("job", "first")["status"].get("active"), "the first to be admitted")
    site.apply(job("second", 0))
    assert site.get("job", "second")["spec"]["suspend"], "Kueue's webhook suspends it"

    def told() -> str | None:
        """Why the second has no quota."""
        for workload in site.get("workloads.kueue.x-k8s.io")["items"]:
            if workload["metadata"]["ownerReferences"][0]["name"] == "second":
                conditions = workload.get("status", {}).get("conditions", [])
                return next((c["message"] for c in conditions if c["status"] == "False"), None)
        return None

    assert "insufficient unused quota" in wait_for(told, "Kueue to hold the second back")
    assert site.get("job", "second")["spec"]["suspend"]
    site.kubectl("delete", "job", "first", check=True)
    wait_for(lambda: site.get("job", "second")["status"].get("succeeded"), "the second to succeed")
