"""manifests/examples/no-shared-storage.yaml: all pods lose their disks, the weights are the same.

The store is a server of S3's protocol (moto) in a pod, in the image that the example tells to make.
As that takes packages from PyPI: `make test-all` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import own_images
from support.manifest import example
from support.site import Site

pytestmark = pytest.mark.tier("all")

IMAGE = "registry.example/trainer-s3:1"
FILE = """FROM {ours}
USER root
RUN /opt/ddpjob/bin/python -m ensurepip
RUN /opt/ddpjob/bin/python -m pip install --no-cache-dir s3fs {server}
USER 1000:1000
"""
BUCKET = """
from urllib.request import Request, urlopen
urlopen(Request("http://127.0.0.1:5000/bucket", method="PUT"))
"""


@pytest.fixture
def store(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A store with an empty bucket, and the Secret that the example's job takes it from."""
    home = tmp_path_factory.mktemp("store")
    context = home / "context"
    context.mkdir()
    file = FILE.format(ours=own_images.trainer(), server="moto[server]")
    with own_images.built("s3", file, context, own_images.from_index(home / "pip")) as name:
        own_images.into_nodes(site.cluster.name, IMAGE, name)
    server = ["/opt/ddpjob/bin/python", "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
    address = own_images.serving(site, "store", IMAGE, server, 5000)
    site.kubectl("exec", "store", "--", "/opt/ddpjob/bin/python", "-c", BUCKET, check=True)
    values = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": f"http://{address}:5000",
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "snapshot-store"}}
    site.apply({**secret, "stringData": values})
    yield
    site.kubectl("delete", "pod/store", "secret/snapshot-store", "--grace-period=1", check=True)


def job(name: str, step_seconds: str) -> dict[str, Any]:
    """The example's job under another name and image, slow enough to be disturbed."""
    (found,) = example("no-shared-storage.yaml")
    found["metadata"]["name"] = name
    found["spec"]["snapshot"]["everySteps"] = 10
    (container,) = found["spec"]["template"]["spec"]["containers"]
    container["image"] = IMAGE
    container["command"] += ["--total-steps", "90", "--step-seconds", step_seconds]
    container["env"][0]["value"] = f"s3://bucket/{name}"
    return found


@pytest.mark.usefixtures("store")
def test_all_disks_are_lost_at_once_and_the_store_has_what_it_takes(site: Site) -> None:
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
    assert site.resumed_from("lost") >= 10
    status = site.wait_phase("lost", "Succeeded")
    assert (status["attempt"], status["restarts"]["total"]) == (2, 1)
    assert site.result("lost") == expected
    site.delete("lost")
