"""The devcluster itself: volumes, repair, and no residue; the rest is shown by all that run on one.

The tests share one cluster and are written in the order of its life: what is read before `up`
is compared after `down`. Other clusters may stand beside it, so what belongs to them is left out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from devcluster import cgroups, nodespace, process
from devcluster.cluster import MARK
from devcluster.cluster import home as cluster_home
from devcluster.layout import Layout
from support import cluster as support
from support.cluster import CHECKOUT, DEVCLUSTER, Cluster, wait_for
from support.patience import PATIENCE, WITHIN

pytestmark = [pytest.mark.root, pytest.mark.tier("all")]

NAME = f"residue-{CHECKOUT}"
STILL = 5.0  # seconds; longer than what a cluster is made of is without its owner's name
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


@dataclass(frozen=True)
class Traces:
    """What a cluster could leave on a host."""

    mounts: set[str]
    namespaces: set[str]
    links: set[str]
    routes: set[str]
    tables: set[str]
    cgroups: set[str]
    processes: set[str] = field(default_factory=set)


def lines(*argv: str) -> set[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def others() -> tuple[set[str], set[str]]:
    """Return the bridges and the cgroups of all other clusters of this machine."""
    listed = json.loads(subprocess.check_output(["ip", "-j", "link", "show", "type", "bridge"]))
    links, groups = set(), set()
    for link in listed:
        owner = Path(link.get("ifalias", "").removeprefix("devcluster "))
        if owner.name and owner.name != NAME:
            links.add(link["ifname"])
            layout = Layout(owner.name, int(link["ifname"].removeprefix("dc")), owner)
            groups.add(layout.cgroup)
    return links, groups


def traces() -> Traces:
    earlier = others()
    shown = json.loads(subprocess.check_output(["ip", "-j", "link", "show"]))
    routes = lines("ip", "route", "show", "table", "all")
    walked = {
        directory: top.name
        for hierarchy in cgroups.hierarchies()
        for top in hierarchy.where.glob("devcluster-*")
        for directory, _, _ in os.walk(top)
    }
    # Whose bridge came or went in between was there, too.
    links, groups = (old | new for old, new in zip(earlier, others(), strict=True))
    device = re.compile(rf" dev ({'|'.join(links)})(n\d+)? ") if links else None
    return Traces(
        mounts=set(mounted()),
        namespaces=lines("ip", "netns", "list") | lines("sh", "-c", "ls /run/netns || true"),
        links={
            link["ifname"]
            for link in shown
            if link["ifname"] not in links and link.get("master", "dc") not in links
            if link.get("master", "dc").startswith("dc")  # else of another program's bridge
        },
        routes={route for route in routes if device is None or not device.search(f"{route} ")},
        tables=lines("nft", "-s", "list", "ruleset"),
        cgroups={directory for directory, top in walked.items() if top not in groups},
        processes=set(running()),
    )


def mounted() -> Iterator[str]:
    """Mounts that name the cluster, and all at places where a node has mounts of its own.

    Logins, timers and other containers mount elsewhere, and may do so meanwhile.
    """
    settings = {f"/proc/sys/{name}" for name in nodespace.SETTINGS}
    places = {"/proc", "/var/log", *nodespace.COVERED, *settings}
    places |= {str(hierarchy.where) for hierarchy in cgroups.hierarchies()}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _, _, root, where = line.split()[:5]
        if where in places or NAME in line:
            yield f"{number} {root} on {where}"


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
def before() -> Traces:
    """What stays: of what other runs make and remove some has no owner's name for a moment."""
    support.down(NAME)
    last, since = traces(), time.monotonic()

    def still() -> Traces | None:
        nonlocal last, since
        now = traces()
        if now != last:
            last, since = now, time.monotonic()
        return last if time.monotonic() - since > STILL else None

    return wait_for(still, "other runs to leave this machine as it is for a moment")


@pytest.fixture(scope="module")
def cluster(before: Traces) -> Iterator[Cluster]:
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
    wait_for(lambda: status()["ok"] or None, f"all to be up, not {shown}")


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


def wait_restarted(cluster: Cluster, number: int, old: str) -> None:
    """Wait until a pod's container is another one than ``old``."""
    what = f"a new container in gang-{number}"
    wait_for(lambda: wait_running(cluster, number) != old or None, what)


def test_a_deleted_claim_takes_its_volume_along(cluster: Cluster) -> None:
    claim = CLAIM.replace("name: data", "name: passing")
    cluster.kubectl("apply", "-f", "-", input=claim, check=True)
    words = ("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/passing", WITHIN)
    cluster.kubectl(*words, check=True)
    path = "jsonpath={.items[?(@.spec.claimRef.name=='passing')].spec.hostPath.path}"
    directory = cluster.kubectl("get", "pv", "-o", path, check=True).stdout
    assert Path(directory).is_dir()
    cluster.kubectl("delete", "pvc", "passing", check=True)
    wait_for(lambda: not Path(directory).exists() or None, "the volume's directory to go")


@pytest.mark.parametrize("component", ["etcd", "apiserver", "node1-containerd", "node2-kubelet"])
def test_up_repairs_a_killed_component(cluster: Cluster, component: str) -> None:
    register = Path(cluster.kubeconfig).parent / "process"
    pid = json.loads((register / f"{component}.json").read_text())["pid"]
    containers = [wait_running(cluster, number) for number in (1, 2)]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: process.identify(pid) is None or None, f"{component} to die")
    assert status()["ok"] is False
    devcluster("up")
    assert_ok()
    assert [wait_running(cluster, number) for number in (1, 2)] == containers


def test_up_brings_all_back_after_a_reboot(cluster: Cluster) -> None:
    old = {number: wait_running(cluster, number) for number in (1, 2)}
    state = Path(cluster.kubeconfig).parent
    link = json.loads((state / "cluster.json").read_text())["index"]
    register = process.Register(state / "process")
    running = [one for name in register.names() if (one := register.running(name)) is not None]
    assert len(running) == len(register.names()), register.names()
    # No process outlives a reboot. A node's first one is there until all within it have ended.
    assert not process.end(running, seconds=PATIENCE, polite=False)
    subprocess.run(["ip", "link", "del", f"dc{link}"], check=True)
    devcluster("up")
    assert_ok()
    for number in (1, 2):
        wait_restarted(cluster, number, old[number])


def test_down_leaves_nothing_and_takes_nothing(cluster: Cluster, before: Traces) -> None:
    for component in ("node1-init", "coredns"):  # a record may be lost, its process must not
        (Path(cluster.kubeconfig).parent / "process" / f"{component}.json").unlink()
    bystander = subprocess.Popen(["sleep", "infinity"])
    try:
        devcluster("down")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert not Path(cluster.kubeconfig).parent.exists()
    deadline = time.monotonic() + PATIENCE
    while True:
        after = traces()
        changed = {
            kind: sorted(getattr(after, kind) ^ getattr(before, kind))
            for kind in ("mounts", "namespaces", "links", "routes", "tables", "cgroups")
        }
        changed["processes"] = sorted(after.processes - before.processes)
        if not any(changed.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    left = {kind: found for kind, found in changed.items() if found}
    assert not left, json.dumps(left, indent=1)
