"""How long a gang waits for its restart when the leading operator is lost in the same moment.

A real API server, etcd and controllers, two operators as they ship with the chart's lease of 15 s,
and the hand kubelet of the tests. A rank fails just after the leader was killed, paused (it goes on
once the other one leads), cut off from the API server, or told to end; measured is from there until
the gang runs again, beside the same restart with the leader in health. What the store tells of each
story is held to the invariants of the tests.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import report

from support import cluster
from support.arena import FLAGS, arena
from support.operator import OperatorProcess, write_kubeconfig
from support.proxy import Fault, Proxy

LEASE_SECONDS = 15  # charts/ddpjob/values.yaml
GANG = "gang"
_PATIENCE = 120.0


def leave_it(_: Proxy, __: OperatorProcess) -> None:
    """The floor."""


def kill(_: Proxy, leader: OperatorProcess) -> None:
    leader.kill()


def pause(_: Proxy, leader: OperatorProcess) -> None:
    assert leader.process is not None
    leader.process.send_signal(signal.SIGSTOP)


def cut_off(way: Proxy, _: OperatorProcess) -> None:
    """No call of its own arrives any more."""
    way.faults = [Fault("answer", lambda _: True, times=100_000, code=503, watches=True)]


def end(_: Proxy, leader: OperatorProcess) -> None:
    leader.terminate()


FAULTS = {"none": leave_it, "killed": kill, "paused": pause, "cut off": cut_off, "ended": end}


def story(kubeconfig: Path, fault: str, folder: Path) -> float:
    """Seconds from the rank's failure until the gang runs again."""
    flags = ("--lease-seconds", str(LEASE_SECONDS))
    # The leader's way to the API server is its own, so that it can be cut off alone.
    with arena(kubeconfig, folder) as stage, Proxy(stage.rest) as way:
        config = write_kubeconfig(folder / "leader", way.url, stage.namespace)
        leader = OperatorProcess(config, stage.namespace, folder, *FLAGS, *flags)
        stage.operators.append(leader.start())
        leader.wait_leading()
        stage.operator(*flags, name="op-b").start().wait_ready()
        stage.apply(GANG)
        stage.wait_phase(GANG, "Running", seconds=_PATIENCE)
        FAULTS[fault](way, leader)
        began = time.monotonic()
        stage.kubelet.finish(f"{GANG}-1", 1, "boom")
        stage.wait_phase(GANG, "Running", attempt=2, seconds=_PATIENCE)
        seconds = time.monotonic() - began
        if fault == "paused":
            assert leader.process is not None
            leader.process.send_signal(signal.SIGCONT)
            assert leader.wait(60) == 1, "it must see that it leads no more"
        status = stage.status(GANG)
        assert status["restarts"]["total"] == 1, status
        stage.proxy.made += way.made  # both are operators to the invariants
    return seconds


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    facts = report.machine()
    found: dict[str, list[float]] = {}
    with cluster.control_plane("failover") as plane, tempfile.TemporaryDirectory() as folder:
        for number in range(1 if args.quick else args.repeats):
            for fault in FAULTS:
                place = Path(folder, f"{number}-{fault}")
                place.mkdir()
                seconds = story(plane.kubeconfig, fault, place)
                found.setdefault(fault, []).append(round(seconds, 3))
                print(f"leader {fault}: {seconds:.2f} s", flush=True)
    rows: list[list[Any]] = [[fault, report.spread(seconds, 2)] for fault, seconds in found.items()]
    print("\n" + report.table(("leader", "s until the gang runs again"), rows))
    print(f"\nlease {LEASE_SECONDS} s; load before {facts['load_before']}")
    report.finish("failover", facts, {"lease": LEASE_SECONDS, "seconds": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
