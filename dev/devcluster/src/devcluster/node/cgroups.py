"""The cgroups of a cluster's nodes, made and removed in every hierarchy, v1 and v2 alike.

Each node lives below its own cgroup and sees it as the root, so that several clusters, and the
host's containers, do not meet there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from devcluster import PATIENCE, Failure


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted hierarchy: where, `cgroup` (v1) or `cgroup2`, and what to mount it again with."""

    where: Path
    kind: str
    options: str


def parse(mounts: str, controllers: set[str]) -> list[Hierarchy]:
    """Return the hierarchies in the text of /proc/mounts, each once."""
    found: dict[str, Hierarchy] = {}
    for line in mounts.splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2":
            found[where] = Hierarchy(Path(where), kind, "")
        elif kind == "cgroup":
            words = options.split(",")
            named = [word for word in words if word.startswith("name=")]
            kept = [word for word in words if word in controllers]
            parts = ["none", *named] if named and not kept else [*kept, *named]
            found[where] = Hierarchy(Path(where), kind, ",".join(parts))
    return list(found.values())


def hierarchies() -> list[Hierarchy]:
    """Return this host's hierarchies; Failure when it has none."""
    controllers = Path("/proc/cgroups").read_text().splitlines()[1:]
    names = {line.split()[0] for line in controllers}
    found = parse(Path("/proc/mounts").read_text(), names)
    if not found:
        raise Failure("no cgroups are mounted: mount cgroup2 on /sys/fs/cgroup")
    return found


def create(name: str, leaf: str) -> list[Hierarchy]:
    """Make cgroup ``name`` (a path below the root) everywhere, and ``leaf`` in it.

    In v2 every cgroup above ``name`` shares its controllers out; ``name`` itself does not yet, as
    that would keep processes out of it.
    """
    found = hierarchies()
    for hierarchy in found:
        parent = hierarchy.where
        for part in (*name.split("/"), leaf):
            if part != leaf:
                _share_out(parent, hierarchy)
            child = parent / part
            child.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                # A v1 cpuset starts empty, and takes no process until it is not.
                if hierarchy.kind == "cgroup" and (child / file).exists():
                    (child / file).write_text((parent / file).read_text())
            parent = child
    return found


def _share_out(parent: Path, hierarchy: Hierarchy) -> None:
    """Let the children of a v2 cgroup use its controllers."""
    if hierarchy.kind != "cgroup2":
        return
    for controller in (parent / "cgroup.controllers").read_text().split():
        try:
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            continue  # not every controller can be shared out; the kubelet names one it lacks


def remove(name: str) -> None:
    """Remove a cgroup and all below it, and end what still lives there.

    Nothing does once a node's PID 1 is gone, unless its record was lost. The kernel may need a
    moment after the last process.
    """
    deadline = time.monotonic() + PATIENCE
    tops = [hierarchy.where / name for hierarchy in hierarchies()]
    while left := [top for top in tops if not _remove_tree(top)]:
        for top in left:
            _kill_all(top)
        if time.monotonic() > deadline:
            raise Failure(f"cgroup {left[0]} still holds processes: see its cgroup.procs")
        time.sleep(0.05)


def holds(name: str, pid: int) -> bool:
    """Tell whether a process lives below cgroup ``name``."""
    try:
        return f"/{name}/" in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _kill_all(top: Path) -> None:
    """Kill the processes of a cgroup and of all below it."""
    for directory, _, _ in os.walk(top):
        with contextlib.suppress(OSError):  # it is being removed, or a process has just ended
            for pid in (Path(directory) / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)


def _remove_tree(top: Path) -> bool:
    for directory, _, _ in os.walk(top, topdown=False):
        try:
            Path(directory).rmdir()
        except OSError:
            return False
    return True
