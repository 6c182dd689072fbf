"""What the soak does to its cluster: each fault a context in which something is broken.

The kinds come from a deck that the seed shuffles: each once before any comes twice. But for a fault
that could not be done, which comes again, nothing that the cluster does decides what is next: a
seed plays the same faults again (at what steps they hit is up to the machine).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soak.gangs import Gang
from support.cluster import wait_for
from support.plane import Plane, is_first, is_rank, processes_with, send
from support.rest import Rest
from support.site import SYSTEM, Site

NODES = ("node1", "node2")


@dataclass(frozen=True, slots=True)
class Stage:
    """What there is to be broken."""

    site: Site
    gangs: Sequence[Gang]
    volume: Path

    @property
    def plane(self) -> Plane:
        return Plane(self.site.cluster)


@dataclass(frozen=True, slots=True)
class Draw:
    """One fault: of what kind, on whom, how long (seconds), and how long to rest afterwards."""

    kind: str
    gang: int
    replica: int
    hold: float
    rest: float
    second: Draw | None = None  # while the first lasts, or shortly after it
    wait: float = 0.0  # before the second


Fault = Callable[[Stage, Draw], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Entry:
    """``alone``: it concerns the gang that was drawn, else all of them."""

    fault: Fault
    hold: tuple[float, float]
    alone: bool


@dataclass
class Catalogue:
    entries: dict[str, Entry] = field(default_factory=dict)

    def add(
        self, hold: tuple[float, float] = (0, 0), *, alone: bool = False
    ) -> Callable[[Callable[[Stage, Draw], Iterator[None]]], Fault]:
        """Enter a generator that breaks, yields once and mends, under its name."""

        def enter(function: Callable[[Stage, Draw], Iterator[None]]) -> Fault:
            made = contextmanager(function)
            name = function.__name__.replace("_", "-")
            self.entries[name] = Entry(made, hold, alone)
            return made

        return enter


FAULTS = Catalogue()
#: What may hit while another fault lasts: nothing of it needs the API server.
SECONDS = ("rank-kill", "ranks-kill", "launcher-kill")


@dataclass
class Deck:
    """Kinds of faults without end, each once before any comes twice."""

    kinds: Sequence[str]
    source: random.Random
    left: list[str] = field(default_factory=list)
    returned: set[str] = field(default_factory=set)

    def draw(self) -> str:
        if not self.left:
            self.left = self.source.sample(self.kinds, len(self.kinds))
            self.returned.clear()
        return self.left.pop()

    def put_back(self, kind: str) -> None:
        """It could not be done: beneath the rest, once only, lest others wait for it for ever."""
        if kind not in self.returned:
            self.returned.add(kind)
            self.left.insert(0, kind)


@dataclass
class Draws(Iterator[Draw]):
    """Faults without end. ``only``: of these kinds."""

    seed: int
    gangs: int
    only: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)
        kinds = [name for name in FAULTS.entries if not self.only or name in self.only]
        self._deck = Deck(kinds, self._source)

    def __next__(self) -> Draw:
        second = self._draw(self._source.choice(SECONDS)) if self._source.random() < 0.25 else None
        kind = self._deck.draw()
        return self._draw(kind, second, self._source.uniform(0, FAULTS.entries[kind].hold[1] + 3))

    def missed(self, draw: Draw) -> None:
        """It could not be done."""
        self._deck.put_back(draw.kind)

    def _draw(self, kind: str, second: Draw | None = None, wait: float = 0.0) -> Draw:
        source = self._source
        hold = source.uniform(*FAULTS.entries[kind].hold)
        gang, replica, rest = (
            source.randrange(self.gangs),
            source.randrange(12),
            source.uniform(0, 5),
        )
        return Draw(kind, gang, replica, hold, rest, second, wait)


# --- Processes of a gang ------------------------------------------------------------------


def inside(stage: Stage, gang: Gang, replica: int) -> list[int]:
    """The processes of a replica."""
    name = f"{gang.name}"
    number = str(replica % gang.kind.replicas)
    where = {"DDPJOB_NAMESPACE": stage.site.namespace, "DDPJOB_NAME": name}
    return processes_with(**where, DDPJOB_REPLICA=number)


def ranks(stage: Stage, draw: Draw, *more: int) -> list[int]:
    """A training process of each of these replicas, as soon as the gang trains."""
    gang = stage.gangs[draw.gang]

    def there() -> list[int] | None:
        found = [
            [pid for pid in inside(stage, gang, draw.replica + one) if is_rank(pid)]
            for one in (0, *more)
        ]
        if not all(found):
            return None
        return [
            pids[(draw.replica + one) % len(pids)]
            for pids, one in zip(found, (0, *more), strict=True)
        ]

    return wait_for(there, f"{gang.name} to train", 240)


def launcher(stage: Stage, draw: Draw) -> list[int]:
    gang = stage.gangs[draw.gang]

    def there() -> list[int] | None:
        return [pid for pid in inside(stage, gang, draw.replica) if is_first(pid)] or None

    return wait_for(there, f"a launcher of {gang.name}", 240)


@FAULTS.add(alone=True)
def rank_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of a training process."""
    send(ranks(stage, draw), signal.SIGKILL)
    yield


@FAULTS.add(alone=True)
def ranks_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of two training processes in two pods."""
    send(ranks(stage, draw, 1), signal.SIGKILL)
    yield


@FAULTS.add(alone=True)
def launcher_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of a launcher, process 1 of its container."""
    send(launcher(stage, draw), signal.SIGKILL)
    yield


@FAULTS.add(alone=True)
def rank_stop(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGSTOP of a training process, for good: a hang."""
    send(ranks(stage, draw), signal.SIGSTOP)
    yield


@FAULTS.add((5, 25), alone=True)
def launcher_stop(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGSTOP of a launcher, which wakes up again."""
    stopped = launcher(stage, draw)
    send(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        send(stopped, signal.SIGCONT)


# --- Pods ---------------------------------------------------------------------------------


def pod_path(stage: Stage, draw: Draw) -> tuple[Rest, str, str]:
    name = stage.gangs[draw.gang].pod(draw.replica)
    rest = Rest(stage.site.cluster.kubeconfig)
    path = f"/api/v1/namespaces/{stage.site.namespace}/pods/{name}"
    wait_for(lambda: rest.find(path), f"pod {name}", 240)
    return rest, path, name


@FAULTS.add(alone=True)
def pod_delete(stage: Stage, draw: Draw) -> Iterator[None]:
    """A pod is deleted with its time to end."""
    rest, path, _ = pod_path(stage, draw)
    rest.delete(path)
    yield


@FAULTS.add(alone=True)
def pod_force_delete(stage: Stage, draw: Draw) -> Iterator[None]:
    """A pod is deleted by force, grace 0."""
    rest, path, _ = pod_path(stage, draw)
    rest.delete(path, grace=0)
    yield


@FAULTS.add(alone=True)
def pod_evict(stage: Stage, draw: Draw) -> Iterator[None]:
    """A pod is evicted through the API."""
    rest, path, name = pod_path(stage, draw)
    meta = {"name": name, "namespace": stage.site.namespace}
    rest.post(f"{path}/eviction", {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
    yield


# --- Nodes --------------------------------------------------------------------------------


def node(draw: Draw) -> str:
    return NODES[draw.replica % len(NODES)]


def without_power(stage: Stage, draw: Draw) -> Iterator[None]:
    stage.site.cluster.node("stop", node(draw))
    try:
        yield
    finally:
        stage.site.cluster.node("start", node(draw))


@FAULTS.add()
def node_reboot(stage: Stage, draw: Draw) -> Iterator[None]:
    """A node's power is cut and comes back at once."""
    yield from without_power(stage, draw)


@FAULTS.add((35, 60))
def node_off(stage: Stage, draw: Draw) -> Iterator[None]:
    """A node is off for long enough to be given up."""
    yield from without_power(stage, draw)


@FAULTS.add((5, 60))
def node_partition(stage: Stage, draw: Draw) -> Iterator[None]:
    """A node is cut off, and lives."""
    stage.site.cluster.node("partition", node(draw))
    try:
        yield
    finally:
        stage.site.cluster.node("heal", node(draw))


def component(stage: Stage, name: str) -> Iterator[None]:
    stage.plane.kill(name)
    try:
        yield
    finally:
        stage.plane.repair()


@FAULTS.add((0, 10))
def kubelet_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of a kubelet, started again."""
    yield from component(stage, f"{node(draw)}-kubelet")


@FAULTS.add((0, 10))
def containerd_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of a node's containerd, started again; its containers live."""
    yield from component(stage, f"{node(draw)}-containerd")


# --- The control plane and the operators --------------------------------------------------


@FAULTS.add((0, 30))
def api_server_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of the API server, started again."""
    yield from component(stage, "apiserver")


@FAULTS.add((0, 15))
def etcd_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of etcd, started again."""
    yield from component(stage, "etcd")


def leader(stage: Stage) -> str:
    def named() -> str | None:
        try:
            return stage.site.leader()[0] or None
        except AssertionError:
            return None  # the pod of the lease is gone

    return wait_for(named, "a leader whose pod is there", 240)


@FAULTS.add()
def leader_delete(stage: Stage, draw: Draw) -> Iterator[None]:
    """The leading operator's pod is deleted."""
    words = ("-n", SYSTEM, "delete", "pod", leader(stage), "--wait=false")
    stage.site.cluster.kubectl(*words, check=True)
    yield


@FAULTS.add()
def operators_kill(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGKILL of both operators."""
    stage.site.kill_operator()
    yield


@FAULTS.add((30, 30))
def operator_stop(stage: Stage, draw: Draw) -> Iterator[None]:
    """SIGSTOP of the leading operator, which wakes up and believes to lead."""
    stopped = [pid for pid in processes_with(HOSTNAME=leader(stage)) if is_first(pid)]
    send(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        send(stopped, signal.SIGCONT)


# --- The snapshots' volume ----------------------------------------------------------------


@FAULTS.add((30, 60))
def volume_full(stage: Stage, draw: Draw) -> Iterator[None]:
    """No byte can be written to the snapshots' volume."""
    filler = stage.volume / ".filler"
    until = time.monotonic() + 5  # what others free meanwhile is taken, too
    try:
        with filler.open("wb", buffering=0) as file:
            while time.monotonic() < until:
                free = os.statvfs(stage.volume).f_bavail
                try:
                    file.write(b"\0" * min(max(free, 1) * 4096, 1 << 24))
                except OSError:
                    time.sleep(0.2)
        yield
    finally:
        filler.unlink(missing_ok=True)
