"""manifests/examples/no-shared-storage.yaml: all pods lose their disks, the weights are the same.

The store is a directory of the tests' claim; `make foreign` has a server of S3's protocol.
"""

from typing import Any

import pytest

from support.manifest import example
from support.site import CLAIM, IMAGES

pytestmark = pytest.mark.tier("all")


def job(name: str, step_seconds: str) -> dict[str, Any]:
    """The example's job under another name, with that store, slow enough to be disturbed."""
    (found,) = example("no-shared-storage.yaml")
    found["metadata"]["name"] = name
    found["spec"]["snapshot"]["everySteps"] = 10
    pod = found["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "store", "persistentVolumeClaim": {"claimName": CLAIM}}]
    (container,) = pod["containers"]
    container["volumeMounts"] = [{"name": "store", "mountPath": "/store"}]
    container["image"] = IMAGES[1]
    container["command"] += ["--total-steps", "90", "--step-seconds", step_seconds]
    container["env"][0]["value"] = f"file:///store/uploads/{name}"
    return found


def test_all_disks_are_lost_at_once_and_the_store_has_what_it_takes(site):
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "snapshot-store"}}
    site.apply(secret)
    site.apply(job("kept", "0"))
    site.wait_phase("kept", "Succeeded")
    expected = site.result("kept")
    site.delete("kept")
    site.apply(job("lost", "0.4"))
    site.wait_running("lost", 1, snapshot_after=20)
    before = {*site.uids("lost").values()}
    # In one request: of three the operator might answer the first before the third is sent.
    chosen = "labelSelector=ddpjob.dev/job-name=lost,ddpjob.dev/attempt=1&gracePeriodSeconds=0"
    pods = f"/api/v1/namespaces/{site.namespace}/pods?{chosen}"
    site.kubectl("delete", "--raw", pods, check=True)
    site.wait_running("lost", 2)
    assert len(before) == 3
    assert before.isdisjoint(site.uids("lost").values())
    site.resumed_from("lost", at_least=10)
    status = site.wait_phase("lost", "Succeeded")
    # Their ends are heard one by one: a replacement that has begun becomes a start of all.
    assert (status["attempt"] in (2, 3), status["restarts"]["total"]) == (True, 1)
    assert site.result("lost") == expected
    site.delete("lost")
