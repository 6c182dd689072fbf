"""What the soak does to its cluster: each fault breaks something, and perhaps mends it again.

The seed shuffles the kinds, each once before any comes twice: it plays the same faults again (at
what steps they hit is up to the machine).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

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


Mend = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Fault:
    """``alone``: it concerns the gang that was drawn, else all of them."""

    what: str
    breaks: Callable[[Stage, Draw], Mend]
    hold: tuple[float, float] = (0, 0)
    alone: bool = False


#: What may hit while another fault lasts: nothing of it needs the API server.
SECONDS = ("rank-kill", "ranks-kill", "launcher-kill")


def draws(seed: int, gangs: int) -> Iterator[Draw]:
    """Yield faults without end."""
    source = random.Random(seed)
    kinds = list(FAULTS)

    def drawn(kind: str, second: Draw | None = None, wait: float = 0.0) -> Draw:
        hold, gang = source.uniform(*FAULTS[kind].hold), source.randrange(gangs)
        return Draw(kind, gang, source.randrange(12), hold, source.uniform(0, 5), second, wait)

    while True:
        for kind in source.sample(kinds, len(kinds)):
            second = drawn(source.choice(SECONDS)) if source.random() < 0.25 else None
            yield drawn(kind, second, source.uniform(0, FAULTS[kind].hold[1] + 3))


@contextmanager
def broken(stage: Stage, draw: Draw) -> Iterator[None]:
    """Have the fault while this lasts."""
    mend = FAULTS[draw.kind].breaks(stage, draw)
    try:
        yield
    finally:
        mend()


# --- Processes ----------------------------------------------------------------------------


def inside(
    stage: Stage, draw: Draw, kind: Callable[[int], bool], replicas: Sequence[int] = (0,)
) -> list[int]:
    """One process of this kind in each of these replicas, as soon as there are some."""
    gang = stage.gangs[draw.gang]
    where = {"DDPJOB_NAMESPACE": stage.site.namespace, "DDPJOB_NAME": gang.name}

    def there() -> list[int] | None:
        found = []
        for one in (draw.replica + more for more in replicas):
            number = str(one % gang.kind.replicas)
            pids = [p for p in processes_with(**where, DDPJOB_REPLICA=number) if kind(p)]
            found += [pids[one % len(pids)]] if pids else []
        return found if len(found) == len(replicas) else None

    return wait_for(there, f"{kind.__name__} of {gang.name}", 240)


def signalled(pids: list[int], number: Signals, *, wakes: bool = False) -> Mend:
    send(pids, number)
    return lambda: wakes and send(pids, SIGCONT)


def stopped_leader(stage: Stage, _: Draw) -> Mend:
    pids = [pid for pid in processes_with(HOSTNAME=stage.site.wait_leader()[0]) if is_first(pid)]
    return signalled(pids, SIGSTOP, wakes=True)


def component(name: str) -> Callable[[Stage, Draw], Mend]:
    """Kill one of the cluster's processes. ``name``: after a node's name if it begins with "-"."""

    def breaks(stage: Stage, draw: Draw) -> Mend:
        stage.plane.kill(node(draw) + name if name.startswith("-") else name)
        return stage.plane.repair

    return breaks


# --- Objects, nodes, the disk -------------------------------------------------------------


def pod(stage: Stage, draw: Draw, *, evict: bool = False, grace: int | None = None) -> Mend:
    name = stage.gangs[draw.gang].pod(draw.replica)
    rest = Rest(stage.site.cluster.kubeconfig)
    path = f"/api/v1/namespaces/{stage.site.namespace}/pods/{name}"
    wait_for(lambda: rest.find(path), f"pod {name}", 240)
    if evict:
        meta = {"name": name, "namespace": stage.site.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        rest.post(f"{path}/eviction", body)
    else:
        rest.delete(path, grace=grace)
    return nothing


def leader_pod(stage: Stage, _: Draw) -> Mend:
    words = ("-n", SYSTEM, "delete", "pod", stage.site.wait_leader()[0], "--wait=false")
    stage.site.cluster.kubectl(*words, check=True)
    return nothing


def operators(stage: Stage, _: Draw) -> Mend:
    stage.site.kill_operator()
    return nothing


def nothing() -> None:
    """What is done stays: others are to mend it."""


def node(draw: Draw) -> str:
    return NODES[draw.replica % len(NODES)]


def switched(off: str, on: str) -> Callable[[Stage, Draw], Mend]:
    def breaks(stage: Stage, draw: Draw) -> Mend:
        stage.site.cluster.node(off, node(draw))
        return lambda: stage.site.cluster.node(on, node(draw))

    return breaks


def full_volume(stage: Stage, _: Draw) -> Mend:
    filler = stage.volume / ".filler"
    until = time.monotonic() + 5  # what others free meanwhile is taken, too
    with filler.open("wb", buffering=0) as file:
        while time.monotonic() < until:
            free = os.statvfs(stage.volume).f_bavail
            try:
                file.write(b"\0" * min(max(free, 1) * 4096, 1 << 24))
            except OSError:
                time.sleep(0.2)
    return filler.unlink


FAULTS: Mapping[str, Fault] = {
    "rank-kill": Fault(
        "SIGKILL of a training process",
        lambda s, d: signalled(inside(s, d, is_rank), SIGKILL), alone=True,
    ),
    "ranks-kill": Fault(
        "SIGKILL of two training processes in two pods",
        lambda s, d: signalled(inside(s, d, is_rank, (0, 1)), SIGKILL), alone=True,
    ),
    "launcher-kill": Fault(
        "SIGKILL of a launcher, process 1 of its container",
        lambda s, d: signalled(inside(s, d, is_first), SIGKILL), alone=True,
    ),
    "rank-stop": Fault(
        "SIGSTOP of a training process, for good: a hang",
        lambda s, d: signalled(inside(s, d, is_rank), SIGSTOP), alone=True,
    ),
    "launcher-stop": Fault(
        "SIGSTOP of a launcher, which wakes up again",
        lambda s, d: signalled(inside(s, d, is_first), SIGSTOP, wakes=True), (5, 25), alone=True,
    ),
    "pod-delete": Fault("A pod is deleted with its time to end", pod, alone=True),
    "pod-force-delete": Fault(
        "A pod is deleted by force, grace 0", lambda s, d: pod(s, d, grace=0), alone=True
    ),
    "pod-evict": Fault(
        "A pod is evicted through the API", lambda s, d: pod(s, d, evict=True), alone=True
    ),
    "node-reboot": Fault(
        "A node's power is cut and comes back at once", switched("stop", "start")
    ),
    "node-off": Fault(
        "A node is off for long enough to be given up", switched("stop", "start"), (35, 60)
    ),
    "node-partition": Fault(
        "A node is cut off, and lives", switched("partition", "heal"), (5, 60)
    ),
    "kubelet-kill": Fault("SIGKILL of a kubelet, started again", component("-kubelet"), (0, 10)),
    "containerd-kill": Fault(
        "SIGKILL of a node's containerd, started again; its containers live",
        component("-containerd"), (0, 10),
    ),
    "api-server-kill": Fault(
        "SIGKILL of the API server, started again", component("apiserver"), (0, 30)
    ),
    "etcd-kill": Fault("SIGKILL of etcd, started again", component("etcd"), (0, 15)),
    "leader-delete": Fault("The leading operator's pod is deleted", leader_pod),
    "operators-kill": Fault("SIGKILL of both operators", operators),
    "operator-stop": Fault(
        "SIGSTOP of the leading operator, which wakes up and believes to lead",
        stopped_leader, (30, 30),
    ),
    "volume-full": Fault(
        "No byte can be written to the snapshots' volume", full_volume, (30, 60)
    ),
}  # fmt: skip
