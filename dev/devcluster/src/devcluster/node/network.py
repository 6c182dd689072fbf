"""The wires: a bridge per cluster, a link per node, routes between pod networks.

lifecycle.py and machine.py plug nodes in. Nodes route to one another's pods directly over the
bridge, so the host forwards nothing and none of its settings change. There is no way out: images
come through `devcluster load`, and a pull from a registry fails at once instead of after a
time-out.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from devcluster import Failure, host
from devcluster.layout import MAX_NODES, SERVICE_NETWORK, Layout, Node

_DISABLED, _FORWARDING = "0", "3"  # STP states of a bridge port
_ALLOW = "-i dc+ -o dc+ -j ACCEPT"
_ALLOWED = re.compile(r"^-A (FORWARD|DOCKER-USER) .*-[io] dc.*-j ACCEPT", re.MULTILINE)


def routes() -> list[str]:
    """Return the destinations that the host has routes for, the default route aside."""
    listed = json.loads(host.run(["ip", "-j", "-4", "route", "show"]) or "[]")
    return [route["dst"] for route in listed if route["dst"] != "default"]


def _link(name: str) -> dict[str, Any] | None:
    shown = host.output(["ip", "-j", "link", "show", "dev", name])
    return dict(json.loads(shown)[0]) if shown else None


def claim_bridge(layout: Layout) -> bool:
    """Make the bridge with its address; return True if it is ours, False if another's.

    Making it is atomic in the kernel, so of two clusters that want one index a single one gets it,
    even when each keeps its state under a different home.
    """
    if host.output(["ip", "link", "add", layout.bridge, "type", "bridge"]) is None:
        found = _link(layout.bridge)
        if found is None:
            raise Failure(f"cannot make bridge {layout.bridge}: does this kernel have bridges?")
        if found.get("ifalias") != layout.alias:
            return False
    host.run(["ip", "link", "set", layout.bridge, "alias", layout.alias, "up"])
    host.run(["ip", "addr", "replace", f"{layout.gateway}/24", "dev", layout.bridge])
    return True


def bridge_is_up(layout: Layout) -> bool:
    """Tell whether the cluster's own bridge exists."""
    found = _link(layout.bridge)
    return found is not None and found.get("ifalias") == layout.alias


def index_of(state: Path) -> int | None:
    """Return the index in the alias of a cluster's bridge, for a lost record."""
    listed = json.loads(host.run(["ip", "-j", "link", "show", "type", "bridge"]) or "[]")
    for link in listed:
        name = link.get("ifname", "")
        if name.removeprefix("dc").isdigit():
            layout = Layout(state.name, int(name.removeprefix("dc")), state)
            if link.get("ifalias") == layout.alias:
                return layout.index
    return None


def remove_bridge(layout: Layout) -> None:
    """Remove the bridge, with the routes that go through it."""
    if bridge_is_up(layout):
        host.run(["ip", "link", "del", "dev", layout.bridge])


def connect(layout: Layout, node: Node, init: int) -> None:
    """Plug a node, the machine of process ``init``, into the bridge."""
    disconnect(layout, node)
    peer = f"{node.link}p"
    pair = ["type", "veth", "peer", "name", peer]
    host.run(["ip", "link", "add", node.link, "master", layout.bridge, *pair])
    host.run(["ip", "link", "set", node.link, "alias", layout.alias])
    host.run(["ip", "link", "set", peer, "netns", str(init), "name", "eth0"])
    host.run(["ip", "link", "set", node.link, "up"])
    lines = [
        "link set lo up",
        f"addr add {node.address}/24 dev eth0",
        "link set eth0 up",
        # Programs of the node itself reach services too: the kernel wants a route before it
        # rewrites the address.
        f"route add {SERVICE_NETWORK} via {layout.gateway}",
    ]
    # To every node that there may ever be, so that adding one changes no other.
    others = [layout.node(number) for number in range(1, MAX_NODES + 1) if number != node.number]
    lines += [f"route add {other.pod_network} via {other.address}" for other in others]
    host.run(["nsenter", "-t", str(init), "-n", "ip", "-batch", "-"], text="\n".join(lines))
    route_to(layout, node)


def reconnect(layout: Layout, node: Node, init: int) -> None:
    """Repair the wire of a node that runs: a lost link, a lost bridge, a partition."""
    found = _link(node.link)
    if found is None or not is_own(layout, found, bridge_is_up(layout)):
        connect(layout, node, init)
        return
    if (found.get("master"), found.get("ifalias")) != (layout.bridge, layout.alias):
        host.run(["ip", "link", "set", node.link, "alias", layout.alias])
        host.run(["ip", "link", "set", node.link, "master", layout.bridge, "up"])
    if is_partitioned(node):
        partition(node, cut=False)
    route_to(layout, node)


def route_to(layout: Layout, node: Node) -> None:
    """Let the host reach a node's pods."""
    via = ["via", node.address, "dev", layout.bridge]
    host.run(["ip", "route", "replace", node.pod_network, *via])


def disconnect(layout: Layout, node: Node) -> None:
    """Remove a node's link, and with it the node's end; one of another cluster stays."""
    found = _link(node.link)
    if found is not None and is_own(layout, found, bridge_is_up(layout)):
        # The kernel may be removing it just now, after the death of the node.
        host.output(["ip", "link", "del", "dev", node.link])


def is_own(layout: Layout, link: dict[str, Any], bridge_is_ours: bool) -> bool:
    """Tell whether a link that has the name of a node's is of this very cluster.

    One without an alias (of an `up` that was interrupted) goes by
    the bridge that it is plugged into; plugged into none, it serves nobody.
    """
    alias, master = link.get("ifalias"), link.get("master")
    if alias:
        return bool(alias == layout.alias)
    return master is None or (master == layout.bridge and bridge_is_ours)


def partition(node: Node, cut: bool) -> None:
    """Cut a node off, or join it again: its bridge port silently drops every frame."""
    state = _DISABLED if cut else _FORWARDING
    host.run(["bridge", "link", "set", "dev", node.link, "state", state])


def is_partitioned(node: Node) -> bool:
    """Tell whether a node is cut off."""
    shown = host.output(["bridge", "-j", "link", "show", "dev", node.link])
    return any(port.get("state") == "disabled" for port in json.loads(shown or "[]"))


def require_forwarding() -> None:
    """Fail when the host's firewall is about to drop frames between nodes.

    Docker, for one, makes bridged frames pass the host's FORWARD chain, whose policy it sets to
    DROP. Its rules are the host's own business, so they are not touched here.
    """
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if not bridged.exists() or bridged.read_text().strip() != "1":
        return
    rules = host.output(["iptables", "-S"]) if shutil.which("iptables") else None
    if rules is not None and drops(rules):
        # Docker keeps its own chain over a restart of its daemon.
        chain = "DOCKER-USER" if "-N DOCKER-USER" in rules else "FORWARD"
        raise Failure(
            "this host's firewall drops bridged traffic, so nodes could not reach one another:"
            f" run `iptables -I {chain} {_ALLOW}` (undo: `iptables -D {chain} {_ALLOW}`),"
            " then this again"
        )


def drops(rules: str) -> bool:
    """Tell whether rules, as `iptables -S` lists them, drop what goes between nodes."""
    return "-P FORWARD DROP" in rules and _ALLOWED.search(rules) is None
