"""Operators are killed, upgraded and rolled back while a gang trains: nothing of it changes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from devcluster import binaries
from support.cluster import ROOT
from support.patience import WITHIN, wait_for
from support.site import OPERATOR_LABEL, SYSTEM, Site, digits


@contextmanager
def left_alone(site: Site, name: str) -> Iterator[None]:
    """Beside whatever is done here a gang trains, and is the same afterwards."""
    site.apply(digits(name, steps=100_000))
    site.wait_running(name, 1)
    gang = site.uids(name)
    yield
    assert site.uids(name) == gang
    status = site.status(name)
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    site.delete(name)


def wait_reports(site: Site, name: str, seen: int) -> None:
    """Progress moves on only when a new operator process has taken over."""
    what = "a new operator to report progress"
    wait_for(lambda: site.progress(name, "step") > seen, what)


def helm(site: Site, *args: str) -> None:
    program = binaries.ensure(["helm"], print)["helm"]
    where = ("--kubeconfig", str(site.cluster.kubeconfig), "-n", SYSTEM)
    done = subprocess.run(
        [program, *args, *where, WITHIN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def operators(site: Site) -> set[str]:
    names = ("-o", "jsonpath={.items[*].metadata.uid}")
    found = site.cluster.read("-n", SYSTEM, "get", "pods", "-l", OPERATOR_LABEL, *names)
    return set(found.split())


@pytest.mark.fault("O6")
def test_an_operator_killed_while_a_job_runs_changes_nothing(site):
    name = "operator-killed"
    with left_alone(site, name):
        for _ in range(3):
            seen = site.progress(name, "step")
            site.kill_operator()
            wait_reports(site, name, seen + 5)


@pytest.mark.tier("all")
def test_a_gang_is_left_alone_by_an_upgrade_and_a_rollback(site):
    name = "beside-upgrades"
    upgrade = ("upgrade", "ddpjob", str(ROOT / "charts" / "ddpjob"), "--reuse-values")
    steps = [(*upgrade, "--set", "commonLabels.team=a,leaseSeconds=10"), ("rollback", "ddpjob")]
    with left_alone(site, name):
        for command in steps:
            before = operators(site)
            helm(site, *command, "--wait")
            wait_for(lambda before=before: operators(site).isdisjoint(before), "new operators")
            wait_reports(site, name, site.progress(name, "step") + 20)


@pytest.mark.tier("all")
def test_helm_test_passes(site):
    helm(site, "test", "ddpjob", "--logs")
