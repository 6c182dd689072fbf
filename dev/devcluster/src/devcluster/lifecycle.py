"""The commands: up, down, status, node. Each may be repeated at any moment, also after a crash.

cli.py calls them. `up` looks at every piece and makes only what is missing, so a cluster that is
whole costs it a few looks, and one that lost a process, a node or (after a reboot) everything is
repaired.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from devcluster import PATIENCE, Failure, binaries, cluster, host, process, render
from devcluster.api import Api, ApiError, connect
from devcluster.cachedir import Log
from devcluster.cluster import Cluster, Wanted
from devcluster.layout import Layout, Node
from devcluster.node import cgroups, machine, network, volumes
from devcluster.oci import images

_PACKAGE_ROOT = Path(__file__).resolve().parents[1]
_NEVER = "1970-01-01T00:00:00Z"


def up(name: str, wanted: Wanted, wanted_images: Sequence[str], log: Log) -> Cluster:
    """Bring a cluster up, or repair it."""
    host.require_root()
    host.require_space(cluster.home(), 2, f"cluster {name}", "DEVCLUSTER_HOME")
    known = cluster.load(name)
    count = wanted.nodes if wanted.nodes is not None else known.nodes if known else 2
    host.ensure_packages({**host.PACKAGES, **(host.NODE_PACKAGES if count else {})}, log)
    fake = wanted.kwok if wanted.kwok is not None else known.kwok if known else 0
    needed = [*binaries.CONTROL_PLANE, *(binaries.NODE if count else ())]
    needed += ["kwok"] if fake else []
    programs = binaries.ensure(needed, log)
    with cluster.hold(name, log):
        started = time.monotonic()
        this = cluster.obtain(name, replace(wanted, nodes=count), log)
        if this.nodes > 1:
            network.require_forwarding()
        _start(this, programs, log)
        log(f"cluster {name} is up: {time.monotonic() - started:.1f} s")
    for image in wanted_images:
        load(name, image, log)
    return this


def _start(this: Cluster, programs: dict[str, Path], log: Log) -> None:
    layout = this.layout
    render.ensure_certificates(layout)
    for node in this.members:
        render.ensure_node_certificates(layout, node)
    this.ensure_process("etcd", [programs["etcd"], *render.etcd(layout)])
    wait(this, "etcd", lambda: _answers(f"{layout.etcd}/health"))  # else kube-apiserver gives up
    served, gates = (
        render.gang_scheduling(binaries.minor_of(programs["kube-apiserver"]))
        if this.gang_scheduling
        else ([], [])
    )
    server = programs["kube-apiserver"]
    this.ensure_process("apiserver", [server, *render.apiserver(layout), *served, *gates])
    keep = [path.resolve().parent for path in programs.values()]
    for node in this.members:  # while the API server starts
        machine.power_on(this, node, keep)
        machine.ensure_containerd(this, node, log)
    api = connect(layout)
    wait(this, "apiserver", lambda: api.find("/readyz") == "ok")
    manager = programs["kube-controller-manager"]
    words = [*render.controller_manager(layout, this.nodes), *gates]
    this.ensure_process("controller-manager", [manager, *words])
    scheduler = programs["kube-scheduler"]
    this.ensure_process("scheduler", [scheduler, *render.scheduler(layout), *gates])
    since = {node.name: ensure_services(this, node, programs) for node in this.members}
    if this.members:
        _start_shared_services(this, api, programs)
    if "kwok" in programs:
        this.ensure_process("kwok", [programs["kwok"], *_kwok_arguments(layout)])
        _ensure_fake_nodes(api, this.kwok)
    elif (fake := this.register.running("kwok")) is not None:
        _ensure_fake_nodes(api, 0)
        process.end([fake])
    for made in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
        found = partial(api.find, f"/api/v1/namespaces/default/{made}")
        wait(this, "controller-manager", found)
    for node in this.members:
        wait(this, f"{node.name}-kubelet", partial(node_is_ready, api, node, since[node.name]))
    if this.members:
        wait(this, "coredns", lambda: _answers(f"http://{layout.loopback}:8181/ready"))


def ensure_services(this: Cluster, node: Node, programs: dict[str, Path]) -> float:
    """Start a node's kubelet and proxy; return since when a report of that kubelet counts."""
    now = float(int(time.time()))  # what it reports has whole seconds
    started = machine.ensure_kubelet(this, node, programs["kubelet"])
    machine.ensure_proxy(this, node, programs["kube-proxy"])
    return now if started else 0.0


def _start_shared_services(this: Cluster, api: Api, programs: dict[str, Path]) -> None:
    layout = this.layout
    text = machine.write_if_changed(layout.state / "Corefile", render.corefile(layout))
    this.ensure_process("coredns", [programs["coredns"], "-conf", layout.state / "Corefile"], text)
    api.ensure("/apis/storage.k8s.io/v1/storageclasses", volumes.STORAGE_CLASS)
    python = ["env", f"PYTHONPATH={_PACKAGE_ROOT}", sys.executable, "-u", "-m"]
    arguments = [str(layout.state), str(layout.index)]
    this.ensure_process("volumes", [*python, "devcluster.node.volumes", *arguments])


def wait(this: Cluster, component: str, done: Callable[[], object]) -> None:
    """Wait for a condition; fail at once when the component that brings it about has died."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        log = this.log_of(component)
        if this.register.running(component) is None:
            raise Failure(f"{component} died: {process.last_lines(log)} (see {log})")
        if time.monotonic() > deadline:
            raise Failure(f"{component} is not ready after {PATIENCE:.0f} s: see {log}")
        time.sleep(0.1)


def node_is_ready(api: Api, node: Node, since: float) -> bool:
    """Tell whether a node reported Ready since then, without the taint of a lost node."""
    return is_ready(api.find(f"/api/v1/nodes/{node.name}") or {}, since)


def is_ready(node: dict[str, Any], since: float = 0.0) -> bool:
    """Tell whether a Node object is Ready by a report since then, and not tainted.

    A kubelet reports as soon as it runs; an older report is that of the one before it.
    """
    conditions = node.get("status", {}).get("conditions", [])
    ready = any(
        one["type"] == "Ready"
        and one["status"] == "True"
        and datetime.fromisoformat(one["lastHeartbeatTime"] or _NEVER).timestamp() >= since
        for one in conditions
    )
    taints = node.get("spec", {}).get("taints", [])
    return ready and not any(one["key"].startswith("node.kubernetes.io/") for one in taints)


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, HTTPException):
        return False


def down(name: str, log: Log) -> None:
    """Remove a cluster: processes, mounts, links, routes, cgroups, files; not the build cache."""
    host.require_root()
    with cluster.hold(name, log):
        state = cluster.home() / name
        this = _find(name, state)
        if this is None and not state.exists() and not cluster.strays(state):
            log(f"there is no cluster {name}")
            return
        cluster.require_own(state)
        cluster.require_no_mounts(state)
        started = time.monotonic()
        left = process.end(cluster.strays(state), seconds=PATIENCE, polite=False)
        if left:
            raise Failure(f"processes of cluster {name} do not end: {[one.pid for one in left]}")
        if this is not None:
            for node in this.members:
                machine.power_off(this, node)
            network.remove_bridge(this.layout)
        cgroups.remove(Layout(name, 0, state).cgroup)  # the same for every index
        cluster.remove_state(state)
        log(f"cluster {name} is gone: {time.monotonic() - started:.1f} s")


def _find(name: str, state: Path) -> Cluster | None:
    """Return the cluster, by its bridge when its record is lost or damaged."""
    try:
        found = cluster.load(name)
    except Failure:
        found = None
    if found is not None:
        return found
    index = network.index_of(state)
    return None if index is None else Cluster(Layout(name, index, state), 0)


def load(name: str, image: str, log: Log) -> None:
    """Import an image into every node of a cluster."""
    host.require_root()
    this = cluster.require(name)
    images.load_into([node.containerd_socket for node in this.members], image, log)


def node_command(name: str, verb: str, number: int, log: Log) -> None:
    """Carry out `node stop|start|partition|heal N`."""
    host.require_root()
    this = cluster.require(name)
    if not 1 <= number <= this.nodes:
        raise Failure(f"node {number}: cluster {name} has nodes 1 to {this.nodes}")
    node = this.layout.node(number)
    with cluster.hold(name, log):
        if verb == "start":
            if not network.bridge_is_up(this.layout):
                raise Failure(f"cluster {name} is down: run `devcluster --name {name} up`")
            programs = binaries.ensure(binaries.NODE, log)
            keep = [path.resolve().parent for path in programs.values()]
            machine.power_on(this, node, keep)
            machine.ensure_containerd(this, node, log)
            since = ensure_services(this, node, programs)
            api = connect(this.layout)
            wait(this, f"{node.name}-kubelet", lambda: node_is_ready(api, node, since))
        elif verb == "stop":
            machine.power_off(this, node)
        elif this.register.running(machine.init_name(node)) is None:
            raise Failure(f"{node.name} is off: run `devcluster node start {number}`")
        else:
            network.partition(node, cut=verb == "partition")
    done = {"stop": "off", "start": "on and Ready", "partition": "cut off", "heal": "joined again"}
    log(f"{node.name} is {done[verb]}")


_CONTROL = ("etcd", "apiserver", "controller-manager", "scheduler")
_SERVICES = ("coredns", "volumes")


def state_of(this: Cluster) -> dict[str, Any]:
    """Return the state of a cluster; key `ok` tells whether all of it is up."""
    expected = [*_CONTROL, *(_SERVICES if this.nodes else ()), *(["kwok"] if this.kwok else [])]
    processes = {name: this.register.running(name) for name in expected}
    try:
        api = connect(this.layout)
        version = api.get("/version")["gitVersion"]
        listed = {node["metadata"]["name"]: node for node in api.get("/api/v1/nodes")["items"]}
    except (OSError, ApiError, HTTPException, Failure):
        version, listed = None, {}
    nodes = {}
    for node in this.members:
        names = [machine.init_name(node), *(f"{node.name}-{kind}" for kind in machine.KINDS)]
        running = [this.register.running(name) for name in names]
        info = listed.get(node.name, {}).get("status", {}).get("nodeInfo", {})
        conditions = listed.get(node.name, {}).get("status", {}).get("conditions", [])
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        cut = running[0] is not None and network.is_partitioned(node)
        nodes[node.name] = {
            "state": "off" if running[0] is None else "partitioned" if cut else "on",
            "ready": ready,
            "address": node.address,
            "missing": [name for name, one in zip(names, running, strict=True) if one is None],
            "kubelet": info.get("kubeletVersion"),
            "runtime": info.get("containerRuntimeVersion"),
        }
    bridge = network.bridge_is_up(this.layout)
    up = all(processes.values()) and bridge and version is not None
    return {
        "name": this.layout.name,
        "ok": up
        and all(n["ready"] and not n["missing"] and n["state"] == "on" for n in nodes.values()),
        "kubernetes": version,
        "server": this.layout.server,
        "kubeconfig": str(this.layout.kubeconfig),
        "logs": str(this.layout.logs),
        "bridge": {"name": this.layout.bridge, "up": bridge},
        "processes": {name: one.pid if one else None for name, one in processes.items()},
        "nodes": nodes,
    }


def show_status(name: str, as_json: bool) -> int:
    """Print the state; return 0 when all is up, 3 when something is not."""
    found = state_of(cluster.require(name))
    if as_json:
        print(json.dumps(found, indent=1))
        return 0 if found["ok"] else 3
    print(f"cluster {name}: {'up' if found['ok'] else 'NOT all up: run `devcluster up`'}")
    print(f"  Kubernetes  {found['kubernetes'] or 'API server does not answer'}  {found['server']}")
    for component, pid in found["processes"].items():
        print(f"  {component:<20}{f'pid {pid}' if pid else 'DOWN'}")
    for node, state in found["nodes"].items():
        ready = "Ready" if state["ready"] else "NotReady"
        versions = f"{state['kubelet'] or ''}  {state['runtime'] or ''}"
        missing = f"  DOWN: {' '.join(state['missing'])}" if state["missing"] else ""
        print(f"  {node:<20}{state['state']}  {ready}  {state['address']}  {versions}{missing}")
    print(f"  kubeconfig  {found['kubeconfig']}")
    print(f"  logs        {found['logs']}")
    return 0 if found["ok"] else 3


_STAGES = Path(__file__).resolve().parents[2] / "kwok" / "stages.yaml"
_MARK = "kwok.x-k8s.io/node"
_NODES = "/api/v1/nodes"


def _kwok_arguments(layout: Layout) -> list[str]:
    """Return the arguments of kwok: it renews leases before the controller manager looks."""
    return [
        f"--kubeconfig={layout.kubeconfig}",
        f"--config={_STAGES}",
        f"--manage-nodes-with-annotation-selector={_MARK}=fake",
        "--node-lease-duration-seconds=20",
        f"--server-address={layout.loopback}:10247",
    ]


def _fake_node(number: int) -> dict[str, Any]:
    """Return fake node ``number``, with room for many pods and GPUs."""
    room = {"cpu": "128", "memory": "2Ti", "pods": "1000", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"kwok{number}",
            "annotations": {_MARK: "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": f"kwok{number}"},
        },
        "spec": {"taints": [{"key": _MARK, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }


def _ensure_fake_nodes(api: Api, count: int) -> None:
    """Have exactly ``count`` fake nodes."""
    listed = api.items(f"{_NODES}?labelSelector=type%3Dkwok")
    present = {found["metadata"]["name"] for found in listed}
    wanted = {f"kwok{number}": number for number in range(1, count + 1)}
    for name in present - wanted.keys():
        api.delete(f"{_NODES}/{name}")
    for name in sorted(wanted.keys() - present):
        api.ensure(_NODES, _fake_node(wanted[name]))
