"""What status.ledger says of a job, beside what its faults took by the clocks of others.

A devcluster, the chart as users install it, a gang of 3 that sleeps in each step and in some
fetches. It waits for a node for a known time; then, one after another, a process is killed, one
stops without dying, a pod is deleted, the hub's pod is deleted by force, a node is cut off, the
operators are killed.
The truth is made of three other clocks: rank 0's event log (steps), the faults' own times, and the
pods' objects. Beside it the sum of all entries and the job's wall time, times its pods.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import restart
from harness import report

from ddpjob_operator.core.objects.json_read import parse_time
from support.cluster import wait_for
from support.patience import WITHIN
from support.rest import Object
from support.site import Site, installed, job, spread

PODS = 3
WAIT_SECONDS, HANG_SECONDS, BETWEEN_SECONDS = 40.0, 30, 25.0
PROGRAM = Path(__file__).with_name("programs") / "metered.py"
_PATIENCE = 240.0
EVERY_STEPS = 20
#: And the cause that the ledger gives it; None: a pod that is lost in any way.
FAULTS = {
    "process killed": "Killed",
    "hang": "Hang",
    "pod deleted": None,
    "pod of the hub deleted by force": None,
    "node cut off": None,
    "operators killed": "",
}
#: Nothing is lost by them.
QUIET = ("operators killed",)


def body(name: str, steps: int) -> Object:
    claim = {"persistentVolumeClaim": {"claimName": "snapshots"}}
    found = job(
        name,
        ["ddpjob-trainer", "run", "/snapshots/metered.py", str(steps)],
        snapshot={"path": "/snapshots", "volume": claim, "everySteps": EVERY_STEPS},
        restart={"maxRestarts": 100, "inPlace": {"enabled": True, "maxWithoutProgress": 100}},
        hang={"stepSeconds": HANG_SECONDS},
        nodeLost={"policy": "Fence", "afterSeconds": 5},
    )
    (evenly,) = spread(found)["spec"]["template"]["spec"]["topologySpreadConstraints"]
    evenly["nodeTaintsPolicy"] = "Honor"  # so that a new pod has room beside the others
    (trainer,) = found["spec"]["template"]["spec"]["containers"]
    trainer["env"] = [{"name": "DDPJOB_TRAINER_EVENTS", "value": f"/snapshots/{name}.jsonl"}]
    return found


def events(site: Site, name: str) -> list[Object]:
    path = site.volume() / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def steps_after(site: Site, name: str, moment: float) -> list[Object]:
    """Steps of processes that began after a moment: the first of them, and more."""
    found = [one for one in events(site, name) if one["time"] > moment]
    starts = [n for n, one in enumerate(found) if one["event"] == "resume"]
    steps = found[starts[-1] :] if starts else []
    return [one for one in steps if one["event"] == "step"]


def disturb(site: Site, name: str, fault: str) -> None:
    if fault in QUIET:
        site.kill_operator()
        return
    nodes = {pod: site.get("pod", pod)["spec"]["nodeName"] for pod in site.pods(name)}
    others = set(nodes.values()) - {nodes[f"{name}-0"]}
    restart.disturb(site, name, fault, next(iter(others), ""))


def story(
    site: Site, name: str, steps: int, faults: list[str]
) -> tuple[list[tuple[str, float]], Object, float]:
    """Run the job; return when each fault was, the status at its end, and its wall seconds."""
    nodes = ("node1", "node2")
    for node in nodes:
        site.kubectl("cordon", node, check=True)
    shutil.copyfile(PROGRAM, site.volume() / PROGRAM.name)
    site.apply(body(name, steps))
    time.sleep(WAIT_SECONDS)  # the length of this fault, not a wait for anything
    for node in nodes:
        site.kubectl("uncordon", node, check=True)
    wait_for(lambda: len(steps_after(site, name, 0.0)) > 50, f"{name} to step", _PATIENCE)
    at: list[tuple[str, float]] = []
    for fault in faults:
        at.append((fault, time.time()))
        disturb(site, name, fault)
        if fault not in QUIET:
            again = lambda: steps_after(site, name, at[-1][1])  # noqa: E731
            wait_for(again, f"{name} to step after: {fault}", _PATIENCE)
        if fault == "node cut off":
            for node in nodes:
                site.cluster.node("heal", node)
        time.sleep(BETWEEN_SECONDS)  # of undisturbed training
    site.kubectl(
        "wait", f"ddpjob/{name}", "--for=condition=Complete", WITHIN, check=True, timeout=900
    )
    found = site.get("ddpjob", name)
    made = parse_time(found["metadata"]["creationTimestamp"])
    ended = parse_time(found["status"]["timings"]["completedAt"])
    assert made
    assert ended
    return at, found["status"], (ended - made).total_seconds()


def outages(found: list[Object], at: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Of each fault the step before it, and the seconds from there to the first step after it."""
    resumes = [e["time"] for e in found if e["event"] == "resume"]
    steps = [e for e in found if e["event"] == "step"]
    lost = []
    for fault, moment in at:
        if fault not in QUIET:
            resumed = next(time for time in resumes if time > moment)
            began = next(e["time"] for e in steps if e["time"] > resumed)
            before = max((e for e in steps if e["time"] < moment + 0.1), key=lambda e: e["time"])
            lost.append({"fault": fault, "step": before["step"], "seconds": began - before["time"]})
    return lost


def truth(found: list[Object], lost: list[dict[str, Any]]) -> dict[str, float]:
    """Pod-seconds by state as the event log and the faults' times have them."""
    sums: dict[str, float] = defaultdict(float)
    reached, first = 0, True
    for one in found:
        if one["event"] == "resume":
            first = True
        if one["event"] != "step":
            continue
        if first:
            first = False  # part of the start
        else:
            sums["repeated" if one["step"] <= reached else "trained"] += one["seconds"] * PODS
        reached = max(reached, one["step"])
    for one in lost:
        sums[f"lost: {FAULTS[one['fault']] or 'pods'}"] += one["seconds"] * PODS
    return dict(sums)


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", default=";".join(FAULTS), help="in their order, ; between")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster must go all the same
    facts = report.machine()
    steps = 900 if args.quick else args.steps
    with installed(os.environ.get("BENCH_CLUSTER") or f"bench-{os.getpid()}") as site:
        at, status, wall = story(site, "metered", steps, args.faults.split(";"))
        found = events(site, "metered")
    booked: dict[str, float] = status["ledger"]["podSeconds"]
    causes: dict[str, float] = status["ledger"]["recovering"]
    lost_by = outages(found, at)
    known = truth(found, lost_by)
    trained = sum(booked.get(one, 0.0) for one in ("productive", "data", "snapshot"))
    lost = booked.get("recovering", 0.0) + booked.get("held", 0.0)
    pods = lost - causes.get("Killed", 0.0) - causes.get("Hang", 0.0)
    fetches = sum(1 for one in found if one["event"] == "step") // 10
    rows: list[list[Any]] = [
        ["all of it", sum(booked.values()), wall * PODS],
        ["steps, the first time", trained, known["trained"]],
        ["steps, again", booked.get("repeated", 0.0), known["repeated"]],
        ["waiting for a node", booked.get("waiting", 0.0), WAIT_SECONDS * PODS],
        ["process killed", causes.get("Killed", 0.0), known["lost: Killed"]],
        ["hang", causes.get("Hang", 0.0), known["lost: Hang"]],
        ["pods lost, with those held", pods, known["lost: pods"]],
    ]
    for row in rows:
        row.append(f"{row[1] / row[2]:.3f}" if row[2] else "-")
        row[1:3] = [f"{value:.1f}" for value in row[1:3]]
    print("\n" + report.table(("what", "ledger, pod-s", "truth, pod-s", "ratio"), rows))
    print(f"\nledger: {json.dumps(booked)}\nrecovering: {json.dumps(causes)}")
    print(f"fetches of {fetches} in all; goodput {status['goodput']}")
    result = {
        "lost": lost_by,
        "booked": booked,
        "causes": causes,
        "truth": known,
        "wall": wall,
        "rows": rows,
    }
    report.finish("ledger", facts, result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
