"""`helm upgrade` and `helm rollback` beside a gang that trains."""

from __future__ import annotations

import subprocess

import pytest

from devcluster import binaries
from support.cluster import ROOT, wait_for
from support.patience import WITHIN
from support.site import OPERATOR_LABEL, SYSTEM, Site, digits

pytestmark = pytest.mark.tier("all")


def helm(site: Site, *args: str) -> None:
    program = binaries.ensure(["helm"], print)["helm"]
    where = ("--kubeconfig", str(site.cluster.kubeconfig), "-n", SYSTEM)
    done = subprocess.run(
        [program, *args, *where, "--wait", WITHIN],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def operators(site: Site) -> set[str]:
    names = ("-o", "jsonpath={.items[*].metadata.uid}")
    found = site.cluster.read("-n", SYSTEM, "get", "pods", "-l", OPERATOR_LABEL, *names)
    return set(found.split())


def test_a_running_gang_is_left_alone(site: Site) -> None:
    name = "beside-upgrades"
    site.apply(digits(name, steps=100_000, step_seconds=0.1))
    site.wait_running(name, 1)
    gang = site.uids(name)
    upgrade = ("upgrade", "ddpjob", str(ROOT / "charts" / "ddpjob"), "--reuse-values")
    steps = [(*upgrade, "--set", "commonLabels.team=a,leaseSeconds=10"), ("rollback", "ddpjob")]
    for command in steps:
        before = operators(site)
        helm(site, *command)
        wait_for(lambda before=before: operators(site).isdisjoint(before), "new operators")
        seen = site.progress(name, "step")
        wait_for(
            lambda seen=seen: site.progress(name, "step") > seen + 20,
            "a new operator to report progress",
        )
    assert site.uids(name) == gang
    status = site.status(name)
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    site.delete(name)
