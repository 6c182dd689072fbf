"""What 500 crash-looping jobs in one namespace cost a healthy gang in another.

A real API server, etcd and controllers, the operator as it ships, and the stand-in for the kubelets
of bench/scale.py, which ends each container of the other namespace as soon as it runs. A gang is
created and restarted again and again: alone, then beside them. Creation is from the POST, a restart
from the end of one pod's container, both until status.phase is Running.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import operator_memory as fleet
from harness import report
from harness.wire import Client
from scale import OURS, Bench, Sample, make_namespaces, stand_in

from support import cluster
from support.operator import OperatorProcess
from support.rest import JOBS, Rest, eventually

NOISY = "noisy"
ALONE, BESIDE = "alone", "beside them"
#: As impatient as a user may make it; what is measured is the operator, not its patience.
RESTART = {"maxRestarts": 10_000, "backoff": {"initialSeconds": 5, "maxSeconds": 30}}

Found = dict[str, dict[str, list[Sample]]]


async def measure(args: Any, plane: cluster.Cluster, operator: OperatorProcess) -> Found:
    """case -> alone or beside -> samples."""
    rest = Rest(plane.kubeconfig)
    found: Found = {}
    async with Client(plane.kubeconfig) as client:
        bench = Bench(client, rest, operator)
        await bench.gang(OURS, 5)  # imports, connections, caches
        for when in (ALONE, BESIDE):
            if when == BESIDE:
                await asyncio.to_thread(crash, rest, args.crashing)
            for _ in range(args.repeats):
                for case, sample in (await bench.gang(OURS, args.size)).items():
                    found.setdefault(case, {}).setdefault(when, []).append(sample)
                    print(f"{case}, {when}: {sample.seconds:.2f} s", flush=True)
    return found


def crash(rest: Rest, count: int) -> None:
    """Post the jobs that never run, and wait until each has been restarted once."""
    spec = {"replicas": 1, "restart": RESTART, "template": fleet.template()}
    for number in range(count):
        fleet.post_job(rest, NOISY, f"crash-{number}", spec, {})

    def all_restarted() -> bool:
        jobs = rest.items(f"{JOBS}/namespaces/{NOISY}/ddpjobs")
        return all(job.get("status", {}).get("attempt", 0) > 1 for job in jobs)

    eventually("each has crashed", all_restarted, 300)


def rows(found: Found) -> list[list[object]]:
    table: list[list[object]] = []
    for case, ways in found.items():
        seconds = {when: [s.seconds for s in samples] for when, samples in ways.items()}
        ratios = [b / a for a, b in zip(seconds[ALONE], seconds[BESIDE], strict=True)]
        told = [report.spread(seconds[when], 2) for when in (ALONE, BESIDE)]
        table.append([case, *told, report.spread(ratios, 2)])
    return table


def options() -> Any:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument("--crashing", type=int, default=500, help="jobs that crash")
    parser.add_argument("--size", type=int, default=20, help="pods of the healthy gang")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.crashing, args.size, args.repeats = 20, 4, 1
    return args


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster must go all the same
    facts = report.machine()
    name = f"t-neighbours-{os.getpid()}"
    children: list[Any] = []
    try:
        plane = cluster.up(name, "--nodes", "0")
        plane.apply_crd()
        make_namespaces(Rest(plane.kubeconfig), OURS, NOISY)
        with tempfile.TemporaryDirectory() as folder:
            more = ("--namespaces", f"{OURS},{NOISY}", "--crashing", NOISY)
            children.append(stand_in(plane.kubeconfig, "", *more))
            served = ("--namespaces", f"{OURS},{NOISY}")
            operator = OperatorProcess(plane.kubeconfig, OURS, Path(folder), *served)
            operator.start()
            children.append(operator.process)
            operator.wait_ready()
            operator.wait_leading()
            found = asyncio.run(measure(args, plane, operator))
            operator.terminate()
    finally:
        for child in children:
            child.kill()
            child.wait()
        cluster.down(name)
    facts["load_after"] = round(os.getloadavg()[0], 2)
    print("\n" + report.table(("case", "s: alone", "s: beside them", "ratio"), rows(found)))
    print(f"\nload before {facts['load_before']}, after {facts['load_after']}")
    samples = {
        case: {when: [vars(s) for s in all_] for when, all_ in ways.items()}
        for case, ways in found.items()
    }
    report.finish("neighbours", facts, {"crashing": args.crashing, "cases": samples}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
