"""A node from the outside: power on, components, power off."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from devcluster import PATIENCE, Failure, process, render
from devcluster.cachedir import Log, digest
from devcluster.cluster import MARK, Cluster
from devcluster.layout import Node
from devcluster.node import cgroups, network
from devcluster.oci import ociarchive
from devcluster.oci.imagestore import Containerd
from devcluster.process import Identity

_SCRIPT = Path(__file__).with_name("nodespace.py")


def _script(cluster: Cluster, node: Node, verb: str, config: Mapping[str, object], why: str) -> int:
    """Run nodespace.py; return the pid that it prints."""
    found = cgroups.create(node.cgroup, "machine")
    places = [[str(one.where), one.kind, one.options] for one in found]
    config = {**config, "cgroup": node.cgroup, "hierarchies": places}
    done = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SCRIPT), verb, json.dumps(config)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
             MARK: str(cluster.layout.state)},
    )  # fmt: skip
    try:
        said, complaint = done.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        done.kill()
        raise Failure(f"{why}: no answer within {PATIENCE:.0f} s") from error
    words = said.split()  # two processes say the pid and `ready`, in whichever order
    pid = next((int(word) for word in words if word.isdigit()), None)
    if done.returncode != 0 or pid is None or (verb == "init" and "ready" not in words):
        lines = complaint.strip().splitlines()
        raise Failure(f"{why}: {lines[-1] if lines else 'it ended without a word'}")
    return pid


def init_name(node: Node) -> str:
    """Return the name under which a node's PID 1 is recorded."""
    return f"{node.name}-init"


def power_on(cluster: Cluster, node: Node, keep: list[Path]) -> Identity:
    """Make the node's namespaces and plug it in, unless it is on; return its PID 1."""
    running = cluster.register.running(init_name(node))
    if running is not None and cgroups.holds(node.cgroup, running.pid):
        network.reconnect(cluster.layout, node, running.pid)
        return running
    power_off(cluster, node)
    logs = node.home / "log"
    for directory in (node.home / "cni", node.home / "kubelet", logs):
        directory.mkdir(parents=True, exist_ok=True)
    kept = sorted({str(path) for path in (cluster.layout.state, *keep)})
    config = {"hostname": node.name, "keep": kept, "logs": str(logs)}
    pid = _script(cluster, node, "init", config, f"{node.name} could not be made")
    identity = cluster.record(init_name(node), pid, "")
    network.connect(cluster.layout, node, pid)
    return identity


def power_off(cluster: Cluster, node: Node) -> None:
    """Pull the plug: the kernel ends all that runs in the node and drops its mounts."""
    identity = cluster.register.read(init_name(node))
    if identity is not None and process.end([identity], seconds=PATIENCE, polite=False):
        raise Failure(f"{node.name} does not end: see `cat /proc/{identity.pid}/stack`")
    network.disconnect(cluster.layout, node)
    cgroups.remove(node.cgroup)
    for component in (init_name(node), *(f"{node.name}-{kind}" for kind in KINDS)):
        cluster.register.forget(component)


KINDS = ("containerd", "kubelet", "proxy")


def ensure_component(
    cluster: Cluster, node: Node, kind: str, argv: list[str], configuration: str
) -> bool:
    """Start a program in the node unless it runs just so; True when it was started."""
    component = f"{node.name}-{kind}"
    init = cluster.register.running(init_name(node))
    if init is None:
        raise Failure(f"{node.name} is off: run `devcluster node start {node.number}`")
    spec = digest(*argv, configuration, str(init.pid), str(init.started))
    identity = cluster.register.running(component)
    if identity is not None:
        if identity.spec == spec:
            return False
        process.end([identity])
    log = cluster.log_of(component)
    log.parent.mkdir(parents=True, exist_ok=True)
    config = {"init": init.pid, "log": str(log), "argv": argv}
    pid = _script(cluster, node, "run", config, component)
    cluster.record(component, pid, spec)
    return True


def write_if_changed(path: Path, text: str) -> str:
    """Write a configuration file and return its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return text


def ensure_containerd(cluster: Cluster, node: Node, log: Log) -> None:
    """Start the node's containerd, wait for it, and give it the pause image."""
    write_if_changed(node.home / "cni" / "10-pods.conflist", render.cni(node))
    text = write_if_changed(node.home / "containerd.toml", render.containerd(node))
    argv = ["containerd", "-c", str(node.home / "containerd.toml")]
    if cluster.register.running(f"{node.name}-containerd") is None:
        node.containerd_socket.unlink(missing_ok=True)
    if ensure_component(cluster, node, "containerd", argv, text):
        wait_for_socket(cluster, node)
        containerd = Containerd(node.containerd_socket)
        if containerd.image_digest(render.PAUSE_IMAGE) is None:
            containerd.ctr("images", "import", ociarchive.busybox(log))


def wait_for_socket(cluster: Cluster, node: Node) -> None:
    """Wait until containerd answers; a kubelet that starts before it would give up."""
    component = f"{node.name}-containerd"
    deadline = time.monotonic() + PATIENCE
    while not _answers(node.containerd_socket):
        if cluster.register.running(component) is None or time.monotonic() > deadline:
            log = cluster.log_of(component)
            raise Failure(f"{component} did not start: {process.last_lines(log)} (see {log})")
        time.sleep(0.05)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def ensure_kubelet(cluster: Cluster, node: Node, program: Path) -> bool:
    """Start the node's kubelet; True when it was started now."""
    layout = cluster.layout
    write_if_changed(node.home / "resolv.conf", "")
    text = write_if_changed(node.home / "kubelet.json", render.kubelet(layout, node))
    argv = [
        str(program),
        f"--config={node.home}/kubelet.json",
        f"--kubeconfig={layout.state}/{node.name}.kubeconfig",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--root-dir={node.home}/kubelet",
        f"--cert-dir={node.home}/kubelet/pki",
    ]
    return ensure_component(cluster, node, "kubelet", argv, text)


def ensure_proxy(cluster: Cluster, node: Node, program: Path) -> None:
    """Start the node's kube-proxy."""
    text = write_if_changed(node.home / "proxy.json", render.proxy(cluster.layout, node))
    argv = [str(program), f"--config={node.home}/proxy.json"]
    ensure_component(cluster, node, "proxy", argv, text)
