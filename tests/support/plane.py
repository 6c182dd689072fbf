"""What runs outside of pods, and how it fails: components of the devcluster and its store.

`devcluster` records each of its processes; they are killed and stopped here, and
`devcluster up` repairs whatever is missing.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request

from devcluster import binaries, render
from devcluster import cluster as devclusters
from devcluster.cluster import Cluster as Kept
from support import cluster
from support.cluster import Cluster, wait_for
from support.patience import PATIENCE
from support.rest import urlopen


@dataclass(frozen=True, slots=True)
class Plane:
    """Components: etcd, apiserver, controller-manager, scheduler, node1-kubelet, ..."""

    cluster: Cluster

    @property
    def _kept(self) -> Kept:
        return devclusters.require(self.cluster.name)

    def pid(self, component: str) -> int:
        """Its process; AssertionError when none runs."""
        found = self._kept.register.running(component)
        assert found is not None, f"no {component} runs"
        return found.pid

    def kill(self, component: str) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid(component), signal.SIGKILL)
        running = self._kept.register.running
        wait_for(lambda: running(component) is None, f"{component} to be gone")

    def repair(self) -> None:
        """Start whatever is missing; wait until all of it is ready."""
        cluster.up(self.cluster.name, "--nodes", str(self._kept.nodes))

    def supervise(self) -> bool:
        """Start the scheduler again if it has ended, as a control plane's kubelet does; True then.

        It ends by itself where its cache contradicts the API server, as after a binding that an API
        server has stored and was killed before it answered.
        """
        kept = self._kept
        if kept.register.running("scheduler") is not None:
            return False
        program = binaries.ensure(["kube-scheduler"], print)["kube-scheduler"]
        with devclusters.hold(self.cluster.name, print):  # repair() may be at it
            return kept.ensure_process("scheduler", [program, *render.scheduler(kept.layout)])

    @property
    def _store(self) -> Path:
        return self._kept.layout.state / "etcd"

    def save_store(self, where: Path) -> None:
        """Copy etcd's data as they are at one moment: it is stopped meanwhile.

        As after a loss of power: a page that is half written belongs to no stored state yet.
        """
        pid = self.pid("etcd")
        os.kill(pid, signal.SIGSTOP)
        try:
            shutil.copytree(self._store, where)
        finally:
            os.kill(pid, signal.SIGCONT)

    def restore_store(self, where: Path) -> None:
        """Put a copy in the store's place, as `etcdutl snapshot restore` with its options
        --bump-revision and --mark-compacted does: watches from before are refused, not fed with
        what they take for old. As Kubernetes advises, what holds caches is started anew: repair().
        """
        last = self._revision()
        for component in ("apiserver", "controller-manager", "scheduler", "etcd"):
            self.kill(component)
        shutil.rmtree(self._store)
        shutil.copytree(where, self._store)
        kept = self._kept
        program = binaries.ensure(["etcd"], print)["etcd"]
        kept.ensure_process("etcd", [program, *render.etcd(kept.layout)])
        wait_for(self._answers, "etcd to answer")
        key = base64.b64encode(b"bump").decode()
        while self._revision() <= last:
            self._etcd("kv/put", {"key": key})
        self._etcd("kv/compaction", {"revision": self._revision()})

    def _answers(self) -> bool:
        try:
            return self._revision() > 0
        except (OSError, http.client.HTTPException):
            return False

    def _revision(self) -> int:
        return int(self._etcd("maintenance/status", {})["header"]["revision"])

    def _etcd(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(f"{self._kept.layout.etcd}/v3/{path}", json.dumps(body).encode())
        with urlopen(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def processes_with(**environment: str) -> list[int]:
    """Processes of this machine, inside containers or not, with these variables."""
    wanted = {f"{key}={value}".encode() for key, value in environment.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = set((entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue  # it has ended meanwhile
            if variables >= wanted:
                found.append(int(entry.name))
    return found


def is_first(pid: int) -> bool:
    """Whether it is process 1 of its container."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    levels = re.search(r"^NSpid:.*\t(\d+)$", status, re.MULTILINE)
    return levels is not None and levels.group(1) == "1"


def is_rank(pid: int) -> bool:
    """Whether it trains: a child of its container's process 1 with a rank's record in memory."""
    try:
        status, maps = (Path(f"/proc/{pid}/{part}").read_text() for part in ("status", "maps"))
    except OSError:
        return False
    parent = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
    child = parent is not None and is_first(int(parent.group(1)))
    return child and bool(re.search(r"/rank-[0-9]*[.]state", maps))


def send(pids: list[int], number: signal.Signals) -> int:
    """Signal them all; how many of them were there."""
    reached = 0
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        reached += 1
    return reached
