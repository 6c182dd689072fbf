"""Prints the components that are up, with versions: for people, or as JSON."""

from __future__ import annotations

import http.client
import json
from typing import Any

from devcluster import cluster, machine, network
from devcluster.api import ApiError, connect
from devcluster.cluster import Cluster
from devcluster.failure import Failure

_CONTROL = ("etcd", "apiserver", "controller-manager", "scheduler")
_SERVICES = ("coredns", "volumes")


def gather(this: Cluster) -> dict[str, Any]:
    """Return the state of a cluster; key `ok` tells whether all of it is up."""
    expected = [*_CONTROL, *(_SERVICES if this.nodes else ()), *(["kwok"] if this.kwok else [])]
    processes = {name: this.register.running(name) for name in expected}
    try:
        api = connect(this.layout)
        version = api.get("/version")["gitVersion"]
        listed = {node["metadata"]["name"]: node for node in api.get("/api/v1/nodes")["items"]}
    except (OSError, ApiError, http.client.HTTPException, Failure):
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


def show(name: str, as_json: bool) -> int:
    """Print the state; return 0 when all is up, 3 when something is not."""
    found = gather(cluster.require(name))
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
