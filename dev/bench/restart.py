"""From a fault until training steps again, by stage, in a cluster with kubelets and containers.

A devcluster of two nodes, the chart as users install it, a gang of 3 replicas that trains the
digits example: a process is killed (in place, and with new pods), a pod deleted (all pods new, or
that one alone while the others wait, or a standby in its place), a launcher killed, a process
stops without dying, a node is cut off under `nodeLost.policy: Fence`. Beside it a bare script that
makes the same pods, and deletes them and makes them again as fast as it can when it sees one fail
or go; of a hang or of a lost node it never hears. Stages are the wall clock's, by the watches of
job and pods; "noticed" holds what kubectl takes to bring the fault about.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import time
import urllib.request
from contextlib import aclosing
from typing import Any

from harness import report
from harness.bare import Script
from harness.wire import Client, Refused

from support.cluster import wait_for
from support.patience import WITHIN
from support.rest import JOBS, Object
from support.site import Site, digits, installed, spread

FOR_EVER = 1_000_000
METRICS_PORT = 9400
AFTER_SECONDS, STEP_SECONDS = 5, 5  # of Fence, of the hang deadline
IN_PLACE = {"maxRestarts": 100, "inPlace": {"enabled": True, "maxWithoutProgress": 100}}
FENCE = {"policy": "Fence", "afterSeconds": AFTER_SECONDS}
NEW_PODS = {"maxRestarts": 100, "inPlace": {"enabled": False}}
#: What is measured: the job's own fields, and whether a script hears of it.
FAULTS: dict[str, tuple[Object, bool]] = {
    "process killed, in place": ({"restart": IN_PLACE}, False),
    "process killed": ({"restart": NEW_PODS}, True),
    "pod deleted": ({"restart": NEW_PODS}, True),
    "pod deleted, others kept": ({"restart": IN_PLACE}, False),
    "pod deleted by force, others kept": ({"restart": IN_PLACE}, False),
    "pod of the hub deleted, others kept": ({"restart": IN_PLACE}, False),
    "launcher killed, others kept": ({"restart": IN_PLACE}, False),
    "pod deleted by force, with a standby": ({"restart": IN_PLACE, "standby": 1}, False),
    "launcher killed, with a standby": ({"restart": IN_PLACE, "standby": 1}, False),
    "hang, in place": ({"restart": IN_PLACE, "hang": {"stepSeconds": STEP_SECONDS}}, False),
    "node lost, others kept": ({"restart": IN_PLACE, "nodeLost": FENCE}, False),
}
STAGES = ("noticed", "old pods gone", "new pods run", "first step")
_PATIENCE = 240.0
_WARM_SECONDS = 10.0  # a standby has long imported torch when it is needed


def state(site: Site, name: str) -> Object:
    """GET /state of replica 0, and its pod's uid; empty where nobody answers."""
    try:
        pod = site.get("pod", f"{name}-0")
        url = f"http://{pod['status']['podIP']}:{METRICS_PORT}/state"
        with urllib.request.urlopen(url, timeout=0.5) as answer:
            return {**json.load(answer), "uid": pod["metadata"]["uid"]}
    except (AssertionError, KeyError, OSError, ValueError):
        return {}


def steps(site: Site, name: str, beyond: Object) -> Object:
    """Wait for a finished step of another life than ``beyond``."""

    def found() -> Object | None:
        body = state(site, name)
        life, before = ([b.get(k) for k in ("uid", "round")] for b in (body, beyond))
        new = life != before and body.get("phase") != "startup"
        return body if new and "loss" in body else None

    return wait_for(found, f"{name} to step", _PATIENCE)


def snapshot_of(site: Site, name: str) -> Object:
    """Wait for the first snapshot; the present life."""
    found = lambda: body if (body := state(site, name)).get("snapshotStep", -1) > 0 else None  # noqa: E731
    return wait_for(found, f"a snapshot of {name}", _PATIENCE)


def disturb(site: Site, name: str, fault: str, node: str) -> None:
    if fault.startswith(("process", "hang")):
        site.kill_training(f"{name}-1", signal="KILL" if "killed" in fault else "STOP")
    elif fault.startswith("launcher"):
        site.kill_launcher(f"{name}-1")
    elif fault.startswith("pod"):
        force = ("--grace-period=0", "--force") if "by force" in fault else ()
        pod = f"{name}-{0 if 'of the hub' in fault else 1}"
        site.kubectl("delete", "pod", pod, "--wait=false", *force, check=True)
    else:
        site.cluster.node("partition", node)


async def ours(site: Site, client: Client, fault: str, name: str, node: str) -> dict[str, float]:
    """Seconds of each stage of one recovery."""
    job = _job(name, fault, node)
    site.apply(job)
    before = await asyncio.to_thread(snapshot_of, site, name)
    if "standby" in fault:
        waits = lambda: "no worker runs" in site.kubectl("logs", f"{name}-3").stdout  # noqa: E731
        await asyncio.to_thread(wait_for, waits, f"a standby of {name}", _PATIENCE)
        await asyncio.sleep(_WARM_SECONDS)
    if "others kept" in fault or "standby" in fault:
        hold = lambda: site.status(name).get("holds")  # noqa: E731
        await asyncio.to_thread(wait_for, hold, f"launchers of {name} that hold", _PATIENCE)
    path = f"{JOBS}/namespaces/{site.namespace}/ddpjobs"
    if node:
        on = [site.get("pod", f"{name}-{n}")["spec"]["nodeName"] == node for n in range(3)]
        assert sum(on) == 1, on
        assert not on[0], "replica 0 and its hub live"
    since, began, attempt = await client.version(path), time.time(), before["attempt"]
    marks: dict[str, float] = {}
    async with aclosing(client.watch(path, since)) as events:
        await asyncio.to_thread(disturb, site, name, fault, node)
        stepping = asyncio.ensure_future(asyncio.to_thread(steps, site, name, before))
        if "in place" not in fault:
            async for event in events:
                found, status = event["object"], event["object"].get("status", {})
                if found["metadata"]["name"] != name or status.get("attempt") == attempt:
                    continue
                stage = {"Restarting": 0, "Starting": 1, "Running": 2}.get(status.get("phase"))
                if stage is not None:
                    marks.setdefault(STAGES[stage], time.time())
                if stage == 2:
                    break
    await stepping
    marks[STAGES[-1]] = time.time()
    result = stages(began, marks)
    recovery = site.status(name)["timings"].get("lastRecoverySeconds")
    if recovery is not None:
        result["status.timings.lastRecoverySeconds"] = recovery
    if node:
        await asyncio.to_thread(site.cluster.node, "heal", node)
        await asyncio.to_thread(
            site.kubectl, "wait", f"node/{node}", "--for=condition=Ready", WITHIN, check=True
        )
    await asyncio.to_thread(site.delete, name)
    return result


async def bare(site: Site, client: Client, fault: str, name: str) -> dict[str, float]:
    script = Script(client, site.namespace, _job(name, fault, ""))
    await script.create()
    before = await asyncio.to_thread(snapshot_of, site, name)
    watching = asyncio.Event()
    work = asyncio.ensure_future(script.restart(watching))
    await watching.wait()
    began = time.time()
    await asyncio.to_thread(disturb, site, name, fault, "")
    stepping = asyncio.ensure_future(asyncio.to_thread(steps, site, name, before))
    await work
    await stepping
    found = stages(began, {**script.marks, STAGES[-1]: time.time()})
    names = [pod["metadata"]["name"] for pod in script.pods]
    site.kubectl("delete", "pod", *names, "--grace-period=1", "--wait", check=True)
    for body in script.network:
        site.kubectl("delete", body["kind"].lower(), body["metadata"]["name"], check=True)
    return found


def stages(began: float, marks: dict[str, float]) -> dict[str, float]:
    """Seconds from the end of the stage before, and in all."""
    found, since = {}, began
    for stage in STAGES:
        if stage in marks:
            found[stage], since = round(max(0.0, marks[stage] - since), 3), marks[stage]
    return {**found, "all": round(since - began, 3)}


def _job(name: str, fault: str, node: str) -> Object:
    fields = FAULTS[fault][0]
    job = digits(name, steps=FOR_EVER, step_seconds=0.1, every=10, **fields)
    if "standby" in fault:  # nothing else that a standby's program imports is warm
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        command[2:2] = ["--preload", "sklearn.datasets"]
    if node:
        (evenly,) = spread(job)["spec"]["template"]["spec"]["topologySpreadConstraints"]
        evenly["nodeTaintsPolicy"] = "Honor"  # so that a new pod has room beside the others
        # Replica 0, which is made first, is elsewhere.
        names = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]}
        wish = {"weight": 100, "preference": {"matchExpressions": [names]}}
        affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
        job["spec"]["template"]["spec"]["affinity"] = affinity
    return job


async def measure(site: Site, faults: list[str], repeats: int) -> dict[str, Any]:
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    async with Client(site.cluster.kubeconfig) as client:
        for fault in faults:
            for number in range(repeats):
                node, label = "", f"{'abcdefghijk'[list(FAULTS).index(fault)]}{number}"
                if fault.startswith("node"):
                    leads = (await asyncio.to_thread(site.leader))[1]
                    node = next(n for n in ("node1", "node2") if n != leads)
                for side in ("ours", "script") if FAULTS[fault][1] else ("ours",):
                    try:
                        async with asyncio.timeout(_PATIENCE):
                            if side == "ours":
                                result = await ours(site, client, fault, f"ours-{label}", node)
                            else:
                                result = await bare(site, client, fault, f"bare-{label}")
                    except (AssertionError, TimeoutError, Refused) as error:
                        print(f"{fault}, {side}: {error!r:.2000}", file=sys.stderr, flush=True)
                        # What is left would take the processor from those that follow.
                        left = "ddpjobs,pods,services,networkpolicies"
                        site.kubectl("delete", left, "--all", "--grace-period=1", timeout=120)
                        continue
                    found.setdefault(fault, {}).setdefault(side, []).append(result)
                    print(f"{fault}, {side}: {result}", flush=True)
    return found


def row(fault: str, side: str, found: list[dict[str, float]]) -> list[object]:
    cells: list[object] = [fault, side, len(found), report.spread([f["all"] for f in found], 2)]
    for stage in (*STAGES, "status.timings.lastRecoverySeconds"):
        values = [one[stage] for one in found if stage in one]
        cells.append(f"{statistics.median(values):.2f}" if values else "-")
    return cells


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each fault")
    parser.add_argument("--faults", default=";".join(FAULTS), help="of them, with ; between")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster must go all the same
    facts = report.machine()
    faults = args.faults.split(";")
    if args.quick:
        faults, args.repeats = faults[:3], 1
    with installed(f"bench-{os.getpid()}") as site:
        found = asyncio.run(measure(site, faults, args.repeats))
    facts["load_after"] = round(os.getloadavg()[0], 2)
    header = ("fault", "by", "n", "s in all", *STAGES, "lastRecoverySeconds")
    rows = [row(fault, s, one) for fault, sides in found.items() for s, one in sides.items()]
    print("\n" + report.table(header, rows))
    print("\nstages: medians, each from the end of the one before; in all: median (range)")
    print(f"load before {facts['load_before']}, after {facts['load_after']}")
    report.finish("restart", facts, {"found": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
