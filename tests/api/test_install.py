"""Who owns what is installed: manifests/install.yaml taken over by helm, one release by the next.

There are no nodes: nothing runs, only objects and their owners are looked at.
"""

import subprocess
from collections.abc import Iterator

import pytest

from devcluster import binaries
from support import cluster
from support.cluster import ROOT, Cluster
from support.manifest import as_json, ddpjob
from support.patience import PATIENCE

CHART = str(ROOT / "charts" / "ddpjob")
SYSTEM = "ddpjob-system"


@pytest.fixture
def plane() -> Iterator[Cluster]:
    """One of this test's own: releases are of a whole cluster."""
    with cluster.control_plane("install") as found:
        found.kubectl("create", "-f", "-", input=as_json(ddpjob("kept")), check=True)
        yield found


def helm(plane: Cluster, *args: str) -> subprocess.CompletedProcess[str]:
    program = binaries.ensure(["helm"], print)["helm"]
    where = ("--kubeconfig", str(plane.kubeconfig), "-n", SYSTEM)
    return subprocess.run(
        [program, *args, *where], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def uid(plane: Cluster) -> str:
    done = plane.kubectl("get", "ddpjob", "kept", "-o", "jsonpath={.metadata.uid}", check=True)
    return done.stdout


def test_a_release_takes_over_what_kubectl_or_another_one_installed(plane):
    before = uid(plane)
    everything = str(ROOT / "manifests" / "install.yaml")
    command = ("apply", "--server-side", "--force-conflicts", "-f", everything)
    told = plane.kubectl(*command, check=True).stderr
    policy = ("get", "validatingadmissionpolicy", "ddpjob-system.ddpjob-operator.operator")
    plane.kubectl(*policy, check=True)  # of install.yaml, and below of a release: Auto
    assert "would violate PodSecurity" not in told, "its namespace enforces the restricted standard"
    refused = helm(plane, "install", "ddpjob", CHART)
    assert refused.returncode != 0
    assert "invalid ownership metadata" in refused.stderr
    done = helm(plane, "install", "ddpjob", CHART, "--take-ownership", "--force-conflicts")
    assert done.returncode == 0, done.stderr
    assert "No admission policy binds" not in done.stdout
    plane.kubectl(*policy, check=True)
    done = helm(plane, "uninstall", "ddpjob")
    assert done.returncode == 0, done.stderr
    ours = ("-l", "app.kubernetes.io/part-of=ddpjob")
    kinds = "clusterrole,deployment,validatingadmissionpolicy,validatingadmissionpolicybinding"
    left = plane.kubectl("get", kinds, "-A", *ours, "-o", "name", check=True)
    assert left.stdout == "", "nothing of install.yaml but its namespace stays"
    assert uid(plane) == before, "the definition stays, and all jobs"
    refused = helm(plane, "install", "other", CHART)
    assert "ddpjobs.ddpjob.dev" in refused.stderr
    command = ("install", "other", CHART, "--take-ownership", "--set")
    refused = helm(plane, *command, "namespaces={default,nowhere}")
    assert "namespaces: nowhere is not there: kubectl create namespace nowhere" in refused.stderr
    assert "other" not in helm(plane, "list", "--all").stdout, "nothing is half installed"
    done = helm(plane, *command, "namespaces={default}")
    assert done.returncode == 0, done.stderr
    assert uid(plane) == before
