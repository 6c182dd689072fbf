"""The devcluster itself: volumes, repair, and no residue; the rest is shown by all that run on one.

The tests share one cluster and are written in the order of its life: what is read before `up`
is compared after `down`. Other clusters may stand beside it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster import process
from devcluster.cluster import MARK
from devcluster.cluster import home as cluster_home
from devcluster.layout import Layout
from devcluster.node import cgroups, nodespace
from support import cluster as support
from support.cluster import CHECKOUT, DEVCLUSTER, Cluster, wait_for

pytestmark = [pytest.mark.root, pytest.mark.tier("all")]

NAME = f"residue-{CHECKOUT}"
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: gang-%(number)d}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: node%(number)d}
  securityContext: {runAsUser: 1000, runAsNonRoot: true}
  containers:
    - name: main
      image: devcluster/busybox:1
      command: [sleep, "1000000"]
      resources: {limits: {memory: 32Mi}}
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"""


def lines(*argv: str) -> set[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def host() -> dict[str, set[str]]:
    """What no cluster changes on a host: what nodes mount, names and rules of networks."""
    settings = {f"/proc/sys/{name}" for name in nodespace.SETTINGS}
    places = {"/proc", "/var/log", *nodespace.COVERED, *settings}
    places |= {str(hierarchy.where) for hierarchy in cgroups.hierarchies()}
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "mounts": {line for line in mounts if line.split()[4] in places},
        "namespaces": lines("ip", "netns", "list") | lines("sh", "-c", "ls /run/netns || true"),
        "tables": lines("nft", "-s", "list", "ruleset"),
    }


def traces() -> dict[str, list[str]]:
    """What there is of the cluster."""
    state = str(cluster_home() / NAME)
    group = Layout(NAME, 0, Path(state)).cgroup
    groups = [hierarchy.where / group for hierarchy in cgroups.hierarchies()]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "files": [state] if Path(state).exists() else [],
        "mounts": [line for line in mounts if NAME in line],
        "links": [line for line in lines("ip", "-o", "link") if state in line],
        "cgroups": [str(group) for group in groups if group.exists()],
        "processes": list(running()),
    }


def running() -> Iterator[str]:
    """Processes that bear the cluster's mark, live in its cgroup, or name its directory."""
    state = cluster_home() / NAME
    mark, group = f"{MARK}={state}".encode(), Layout(NAME, 0, state).cgroup
    for entry in Path("/proc").iterdir():
        try:
            identity = process.identify(int(entry.name))
            name = (entry / "comm").read_text().strip()
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            inside = f"/{group}" in (entry / "cgroup").read_text()
            named = f"{state}/".encode() in (entry / "cmdline").read_bytes()
        except (ValueError, OSError):
            continue
        if identity is not None and (marked or inside or named):
            yield f"{identity.pid} {identity.started} {name}"


@pytest.fixture(scope="module")
def before() -> dict[str, set[str]]:
    support.down(NAME)
    return host()


@pytest.fixture(scope="module")
def cluster(before: dict[str, set[str]]) -> Iterator[Cluster]:
    try:
        found = support.up(NAME, "--nodes", "2")
        found.kubectl("apply", "-f", "-", input=CLAIM, check=True)
        for number in (1, 2):
            found.kubectl("apply", "-f", "-", input=POD % {"number": number}, check=True)
        for number in (1, 2):
            wait_running(found, number)
        yield found
    finally:
        support.down(NAME)


def devcluster(*words: str) -> str:
    command = [sys.executable, DEVCLUSTER, "--name", NAME, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


def status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(devcluster("status", "--json"))
    return found


def assert_ok() -> None:
    """Assert that all is up; else show what is not.

    All runs now. What the API server tells may be late: while it was away nodes could not report,
    and one that has not yet done so again is NotReady until it does.
    """
    found = status()
    shown = json.dumps(found, indent=1)
    assert all(found["processes"].values()), shown
    assert found["bridge"]["up"], shown
    for node in found["nodes"].values():
        assert (node["state"], node["missing"]) == ("on", []), shown
    wait_for(lambda: status()["ok"], f"all to be up, not {shown}")


def pod(cluster: Cluster, number: int) -> dict[str, Any]:
    text = cluster.read("get", "pod", f"gang-{number}", "-o", "json")
    found: dict[str, Any] = json.loads(text)["status"]
    return found


def wait_running(cluster: Cluster, number: int) -> str:
    """Wait until a pod's container runs; return that container's id."""

    def container() -> str | None:
        for one in pod(cluster, number).get("containerStatuses", []):
            if "running" in one["state"]:
                return str(one["containerID"])
        return None

    return wait_for(container, f"gang-{number} to run")


@pytest.mark.parametrize("component", ["etcd", "apiserver", "node1-containerd", "node2-kubelet"])
def test_up_repairs_a_killed_component(cluster, component):
    register = Path(cluster.kubeconfig).parent / "process"
    pid = json.loads((register / f"{component}.json").read_text())["pid"]
    containers = [wait_running(cluster, number) for number in (1, 2)]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: process.identify(pid) is None, f"{component} to die")
    assert status()["ok"] is False
    devcluster("up")
    assert_ok()
    assert [wait_running(cluster, number) for number in (1, 2)] == containers


def test_down_leaves_nothing_and_takes_nothing(cluster, before):
    there = {kind for kind, found in traces().items() if found}
    assert there >= {"files", "links", "cgroups", "processes"}, "else it would see nothing left"
    for component in ("node1-init", "coredns"):  # a record may be lost, its process must not
        (Path(cluster.kubeconfig).parent / "process" / f"{component}.json").unlink()
    bystander = subprocess.Popen(["sleep", "infinity"])
    try:
        devcluster("down")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    wait_for(lambda: not any(traces().values()), f"all of it to go: {traces()}")
    assert host() == before
