"""Installs Kueue: its manager as an image of our own build, with the chart of the same Go module.

cli.py calls it for `devcluster kueue`. Kueue queues what carries a queue's name: batch Jobs, and
the kinds whose own controllers manage a Workload (`externalFrameworks`). It leaves pods alone.
"""

from __future__ import annotations

import http.client
import io
import json
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

from devcluster import PATIENCE, Failure, binaries, cluster, host
from devcluster.api import Api, ApiError, connect
from devcluster.cachedir import Log, cache_root, digest, ensure_dir, timed
from devcluster.oci import images, ociarchive
from devcluster.oci.imagestore import Containerd

NAMESPACE = "kueue-system"
VERSION = binaries.MODULES["kueue"][1]
_FORMAT = "2"
_REPOSITORY = "docker.io/devcluster/kueue"
_NOBODY = "65532:65532"
_SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
_PROBE = {"initialDelaySeconds": 1, "periodSeconds": 1, "failureThreshold": 30}
_CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": False},
    "integrations": {
        "frameworks": ["batch/job"],
        "externalFrameworks": ["DDPJob.v1alpha1.ddpjob.dev"],
    },
}
_FLAVOR = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "ResourceFlavor",
    "metadata": {"name": "devcluster-probe"},
}


def install(name: str, log: Log) -> None:
    """Have Kueue in a cluster, ready to admit."""
    host.require_root()
    this = cluster.require(name)
    if not this.nodes:
        raise Failure(
            f"cluster {name} has no nodes, and Kueue runs in a pod:"
            f" run `devcluster --name {name} up --nodes 2` first"
        )
    programs = binaries.ensure(["helm", "kueue"], log)
    image = f"{_REPOSITORY}:{digest(_FORMAT, programs['kueue'].parent.name)}"
    made = _make(programs["kueue"], image, log)
    lacking = [
        node.containerd_socket
        for node in this.members
        if Containerd(node.containerd_socket).image_digest(image) is None
    ]
    images.load_into(lacking, str(made / "image.tar"), log)
    helm: list[str | Path] = [programs["helm"], f"--kubeconfig={this.layout.kubeconfig}"]
    options = f"--namespace {NAMESPACE} --create-namespace --values - --wait --timeout"
    chart: list[str | Path] = [made / "chart", *options.split(), f"{PATIENCE:.0f}s"]
    command = [*helm, "upgrade", "--install", "kueue", *chart]
    with timed(f"installing Kueue {VERSION} in namespace {NAMESPACE}", log):
        text = json.dumps(values(image))
        host.run(
            command, f"installing Kueue (see pods in {NAMESPACE})", timeout=PATIENCE + 10, text=text
        )
        _wait_for_webhooks(connect(this.layout))


def values(image: str) -> dict[str, Any]:
    """Return the chart's values: one small manager that takes DDPJobs for somebody's."""
    repository, _, tag = image.rpartition(":")
    manager = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "resources": _SMALL,
    }
    return {
        "controllerManager": {
            "replicas": 1,
            "manager": manager,
            "readinessProbe": _PROBE,
            "featureGates": [{"name": "VisibilityOnDemand", "enabled": False}],
        },
        "managerConfig": {"controllerManagerConfigYaml": json.dumps(_CONFIGURATION)},
    }


def _make(program: Path, image: str, log: Log) -> Path:
    """Return a directory with the manager's image and the chart, made once per build."""
    home = cache_root() / f"kueue-{image.rpartition(':')[2]}"

    def make(aside: Path) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            ociarchive.add(tar, "manager", program.read_bytes(), 0o755)
        config = {"User": _NOBODY, "Cmd": ["/manager"]}
        (aside / "image.tar").write_bytes(ociarchive.pack(image, packed.getvalue(), config))

        # An API behind the API server: while it is down no namespace could be removed.
        unwanted = shutil.ignore_patterns("visibility")
        chart = binaries.module_directory("kueue") / "charts" / "kueue"
        shutil.copytree(chart, aside / "chart", ignore=unwanted)

    ensure_dir(home, make, log)
    return home


def _wait_for_webhooks(api: Api) -> None:
    """Wait until the API server, with an answer of Kueue's webhooks, would accept a flavour."""
    flavors = "/apis/kueue.x-k8s.io/v1beta2/resourceflavors?dryRun=All"
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            api.request("POST", flavors, _FLAVOR)
            return
        except (OSError, http.client.HTTPException, ApiError) as error:
            if time.monotonic() > deadline:
                raise Failure(f"Kueue's webhooks do not answer: {error}") from error
        time.sleep(0.2)
