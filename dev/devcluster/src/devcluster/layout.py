"""Names, addresses and paths of one cluster, all derived from its index. Pure.

Two clusters never share a bridge, a subnet or a listening address, so that they can run side by
side; the service network exists only inside the nodes and is the same in each.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from devcluster import Failure
from devcluster.cachedir import digest

MAX_INDEX = 63
MAX_NODES = 32
SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
CLUSTER_DOMAIN = "cluster.local"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?")
_SOCKET_PATH_LIMIT = 107
#: Characters that configuration files, `ip`, openssl or mount options would misread.
_UNFIT = re.compile(r"""[\s,:;'"`\\]""")
#: A route wider than this (a VPN's) leads nowhere in particular, and gives way to narrower ones.
_WIDEST_ROUTE = 12


@dataclass(frozen=True, slots=True)
class Node:
    """One node: a machine made of namespaces, numbered from 1."""

    number: int
    name: str
    address: str
    pod_network: str
    link: str
    home: Path
    cgroup: str

    @property
    def containerd_socket(self) -> Path:
        """Return containerd's socket; on a shared filesystem, so the host reaches it as well."""
        return self.home / "containerd.sock"


@dataclass
class Layout:
    """One cluster's names, addresses and paths."""

    name: str
    index: int
    state: Path

    def __post_init__(self) -> None:
        index, state = self.index, self.state
        self.bridge = f"dc{index}"  # joins the nodes and the host
        self.alias = f"devcluster {state}"  # of the bridge and of each node's link: their owner
        self.gateway = f"10.89.{index}.1"  # the host's address on the bridge: API server and DNS
        self.loopback = f"127.89.{index}.1"  # for servers that no pod may reach
        self.node_network = f"10.89.{index}.0/24"  # the bridge's
        self.pod_network = f"10.{128 + index}.0.0/16"  # holds every node's
        self.server = f"https://{self.gateway}:6443"
        self.etcd = f"http://{self.loopback}:2379"  # it has no TLS
        # Of all containers, in every hierarchy. After the state directory, as two homes may have
        # the same name and, after a reboot, the same index.
        self.cgroup = f"devcluster-{self.name}-{digest(str(state))[:8]}"
        self.logs = state / "log"
        self.pki = state / "pki"
        self.kubeconfig = state / "admin.kubeconfig"
        self.volumes = state / "volumes"  # the PersistentVolumes of class `shared`

    def node(self, number: int) -> Node:
        """Return node ``number``, 1 to MAX_NODES."""
        if not 1 <= number <= MAX_NODES:
            raise Failure(f"node {number}: nodes are numbered 1 to {MAX_NODES}")
        return Node(
            number=number,
            name=f"node{number}",
            address=f"10.89.{self.index}.{10 + number}",
            pod_network=f"10.{128 + self.index}.{number}.0/24",
            link=f"dc{self.index}n{number}",
            home=self.state / f"node{number}",
            cgroup=f"{self.cgroup}/node{number}",
        )


def check_name(name: str, home: Path) -> None:
    """Refuse a name that cannot be part of a path, a cgroup and a socket's name."""
    if not _NAME.fullmatch(name):
        raise Failure(
            f"--name {name!r}: use 1 to 20 lower-case letters, digits and dashes,"
            " a letter or digit first and last"
        )
    if _UNFIT.search(str(home)):
        raise Failure(
            f"DEVCLUSTER_HOME {str(home)!r}: blanks, commas, colons, quotes and backslashes do"
            " not work in its path: set it to another directory"
        )
    longest = home / name / f"node{MAX_NODES}" / "containerd.sock.ttrpc"
    if len(str(longest)) > _SOCKET_PATH_LIMIT:
        raise Failure(
            f"{home} is too long a path for Unix sockets below it:"
            " set DEVCLUSTER_HOME to a shorter one"
        )


def free_index(taken: set[int], routes: list[str]) -> int:
    """Return the lowest index that no cluster has and whose subnets overlap none of ``routes``."""
    every = [ipaddress.ip_network(route, strict=False) for route in routes]
    used = [route for route in every if route.prefixlen >= _WIDEST_ROUTE]
    for index in range(MAX_INDEX + 1):
        if index in taken:
            continue
        layout = Layout("any", index, Path("/"))
        wanted = (layout.node_network, layout.pod_network)
        subnets = [ipaddress.ip_network(subnet) for subnet in wanted]
        if not any(subnet.overlaps(route) for subnet in subnets for route in used):
            return index
    raise Failure(
        f"all {MAX_INDEX + 1} address ranges are taken:"
        " see `devcluster list` and `ip route`, and run `devcluster down` for a cluster"
    )
