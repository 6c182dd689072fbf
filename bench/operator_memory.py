"""What the operator takes in memory, and how long its event loop is blocked, beside hostile jobs.

A real API server and etcd without nodes; the real operator, started anew for each set of objects:
10,000 running pods of 200 jobs with 800 finished ones, 100 suspended jobs of 1.1 MB each that a
user with the right to edit may write, and both. Peak resident memory at the end of the start and
after two more lists of all jobs; the longest step of the event loop, in its own processor time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import programs, report

from support import cluster
from support.operator import OperatorProcess
from support.rest import JOBS, Object, Rest, eventually

RESYNC_SECONDS = 10.0
PAGES = 4  # of two lists of 1,000 jobs
LIMIT_MIB = 512  # charts/ddpjob/values.yaml
HOSTILE_BYTES = 1_100_000
_POSTS = 12  # at once
#: What fills a hostile job, each unit as often as fits: a pod's own fields, and long text. Smaller
#: objects would take more here, but first of all they fill the API server's own memory.
UNITS = {
    "fields": '{"name":"SETTING_%d","value":"of the program, one of very many"}',
    "text": '"' + "lorem ipsum " * 1000 + '"',
}


def template(filler: list[Any] | None = None) -> Object:
    """An ordinary pod with 20 variables of its own."""
    env = [{"name": f"SETTING_{n}", "value": f"of the program, number {n}"} for n in range(20)]
    trainer = {
        "name": "trainer",
        "image": "registry.example.com/team/train:2026-11",
        "command": ["ddpjob-trainer", "run", "train.py", "--epochs", "90"],
        "env": env,
        "resources": {"limits": {"cpu": "8", "memory": "32Gi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    body: Object = {
        "schedulerName": "nobody",
        "containers": [trainer],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    }
    if filler:
        body["overhead"] = filler
    return {"spec": body}


def hostile(unit: str) -> list[Any]:
    size, found = 0, []
    while size < HOSTILE_BYTES:
        text = unit % len(found) if "%" in unit else unit
        found.append(json.loads(text))
        size += len(text) + 1
    return found


def post_job(rest: Rest, namespace: str, name: str, spec: Object, status: Object) -> Object:
    path = f"{JOBS}/namespaces/{namespace}/ddpjobs"
    body: Object = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }
    job = rest.post(path, body)
    if status:
        job = rest.call("PUT", f"{path}/{name}/status", {**job, "status": status})
    return job


def post_pod(rest: Rest, job: Object, replica: int) -> None:
    meta = job["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/pods"
    owner = {"apiVersion": job["apiVersion"], "kind": "DDPJob", "name": meta["name"]}
    labels = {"job-name": meta["name"], "job-uid": meta["uid"], "attempt": 1, "replica": replica}
    name = f"{meta['name']}-{replica}"
    pod = rest.post(
        path,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {f"ddpjob.dev/{key}": str(value) for key, value in labels.items()},
                "ownerReferences": [{**owner, "uid": meta["uid"], "controller": True}],
            },
            "spec": {**template()["spec"], "restartPolicy": "Never"},
        },
    )
    container = {
        "name": "trainer",
        "image": "train",
        "imageID": "sha256:0",
        "ready": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now()}},
    }
    status = {"phase": "Running", "containerStatuses": [container], "startTime": now()}
    rest.call("PUT", f"{path}/{name}/status", {**pod, "status": status})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended() -> Object:
    condition = {
        "type": "Complete",
        "status": "True",
        "reason": "Succeeded",
        "message": "all replicas succeeded",
        "lastTransitionTime": now(),
    }
    times = {"startedAt": now(), "completedAt": now()}
    return {"phase": "Succeeded", "attempt": 1, "conditions": [condition], "timings": times}


def running() -> Object:
    times = {"startedAt": now(), "attemptStartedAt": now(), "runningAt": now()}
    return {"phase": "Running", "attempt": 1, "membersSince": 1, "timings": times}


def fill(rest: Rest, sizes: dict[str, int]) -> None:
    """Create all objects, many at once."""
    for namespace in ("fleet", "hostile", "nothing"):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        rest.post("/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        eventually("the namespace's ServiceAccount", lambda path=account: rest.find(path))
    gang = sizes["pods"] // sizes["running"]
    spec = {"replicas": gang, "template": template()}
    with ThreadPoolExecutor(_POSTS) as pool:

        def all_of(what: str, work: Callable[[int], object], numbers: Iterable[int]) -> list[Any]:
            began, done = time.monotonic(), list(pool.map(work, numbers))
            print(f"{what}: {len(done)} in {time.monotonic() - began:.0f} s", flush=True)
            return done

        all_of(
            "finished jobs",
            lambda n: post_job(rest, "fleet", f"done-{n}", spec, ended()),
            range(sizes["finished"]),
        )
        jobs = all_of(
            "running jobs",
            lambda n: post_job(rest, "fleet", f"run-{n}", spec, running()),
            range(sizes["running"]),
        )
        all_of(
            "pods",
            lambda n: post_pod(rest, jobs[n // gang], n % gang),
            range(gang * sizes["running"]),
        )
        fillers = [hostile(unit) for unit in UNITS.values()]

        def one(n: int) -> None:
            filled = {**spec, "suspend": True, "template": template(fillers[n % len(fillers)])}
            # The last in every order: whatever a list learns from the first is wrong by then.
            post_job(rest, "hostile", f"z-{n:04}", filled, {})

        all_of("hostile jobs", one, range(sizes["hostile"]))


class Probe(threading.Thread):
    """Asks /healthz again and again: what stands still for whatever reason does not answer."""

    def __init__(self, operator: OperatorProcess) -> None:
        super().__init__(daemon=True)
        self.operator, self.over = operator, threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self.over.wait(0.02):
            began = time.monotonic()
            if self.operator.probe("/healthz")[0]:
                self.seconds.append(time.monotonic() - began)


def memory(operator: OperatorProcess) -> dict[str, float]:
    """Resident memory of the process in MiB: the peak since its start, and now."""
    assert operator.process is not None
    text = Path(f"/proc/{operator.process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    found = {"peak": fields["VmHWM"], "now": fields["VmRSS"]}
    return {name: round(int(value.split()[0]) / 1024, 1) for name, value in found.items()}


def lists(operator: OperatorProcess) -> float:
    """How many pages of jobs it has asked for."""
    wanted = 'ddpjob_api_requests_total{code="200",resource="ddpjobs",verb="list"}'
    lines = operator.probe("/metrics")[1].splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(wanted)), 0.0)


def cpu(operator: OperatorProcess) -> float:
    """Seconds of processor time that it has taken."""
    assert operator.process is not None
    fields = Path(f"/proc/{operator.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(plane: cluster.Cluster, namespaces: str, source: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--lease-namespace", "nothing", "--resync-seconds", str(RESYNC_SECONDS))
        operator = OperatorProcess(plane.kubeconfig, namespaces, Path(folder), *flags)
        operator._env["PYTHONPATH"] = os.pathsep.join(
            (programs.program("steps"), str(source / "contract/src"), str(source / "operator/src"))
        )
        began = time.monotonic()
        operator.start()
        probe = Probe(operator)
        probe.start()
        try:
            operator.wait_ready()
            result: dict[str, Any] = {"ready_seconds": round(time.monotonic() - began, 1)}
            operator.wait_leading()
            time.sleep(RESYNC_SECONDS)  # what came with the start is over
            result["start"] = memory(operator)
            pages, spent, began = lists(operator), cpu(operator), time.monotonic()
            more = pages + PAGES
            eventually("two lists", lambda: lists(operator) >= more, 300, every=0.5)
            share = (cpu(operator) - spent) / (time.monotonic() - began)
            result["resyncs"] = memory(operator)
            result["processor_share"] = round(share, 3)
        finally:
            probe.over.set()
            operator.kill()
            operator.wait()
        result["healthz_seconds"] = report.summary(probe.seconds)
        steps = re.findall(r"^longest step: (\d+) ms, (.*)", operator.log(), re.MULTILINE)
        result["longest_step"] = {"ms": int(steps[-1][0]), "of": steps[-1][1]} if steps else {}
        return result


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="measure the operator of checkout DIR as well"
    )
    parser.add_argument("--kubeconfig", type=Path, help="an API server that was filled already")
    parser.add_argument("--keep", action="store_true", help="leave the API server running")
    args = parser.parse_args()
    facts = report.machine()
    share = 10 if args.quick else 1
    sizes = {"pods": 10_000, "running": 200, "finished": 800, "hostile": 100}
    sizes = {name: size // share for name, size in sizes.items()}
    sources = {"now": report.ROOT}
    if args.before:
        sources = {"before": args.before, **sources}
    name = f"t-bench-{os.getpid()}"
    if args.kubeconfig:
        plane = cluster.Cluster(name, args.kubeconfig, Path("kubectl"))
    else:
        plane = cluster.up(name, "--nodes", "0")
    try:
        if not args.kubeconfig:
            plane.apply_crd()
            fill(Rest(plane.kubeconfig), sizes)
        found = {
            scene: {which: measure(plane, names, source) for which, source in sources.items()}
            for scene, names in (
                ("nothing", "nothing"),
                ("fleet", "fleet"),
                ("hostile", "hostile"),
                ("fleet and hostile", "fleet,hostile"),
            )
        }
    finally:
        if args.keep:
            print(f"left running: {plane.kubeconfig}")
        elif not args.kubeconfig:
            cluster.down(name)
    header = (
        *("objects", "code", "ready s", "peak MiB at start", "after two resyncs", "at rest"),
        *("processor share", "longest step ms", "/healthz ms: median", "p95", "longest"),
    )
    print(report.table(header, [row(s, w, r) for s, by in found.items() for w, r in by.items()]))
    print(f"limit of the chart: {LIMIT_MIB} MiB; {sizes}")
    report.finish("operator_memory", facts, {"sizes": sizes, "found": found}, args.json)
    return 0 if found["fleet and hostile"]["now"]["resyncs"]["peak"] < LIMIT_MIB / 2 else 1


def row(scene: str, which: str, result: dict[str, Any]) -> list[object]:
    answers = result["healthz_seconds"]
    times = [f"{1000 * answers[key]:.0f}" for key in ("median", "p95", "max")]
    peaks = [result["start"]["peak"], result["resyncs"]["peak"], result["resyncs"]["now"]]
    step = result["longest_step"].get("ms", "< 5")
    return [scene, which, result["ready_seconds"], *peaks, result["processor_share"], step, *times]


if __name__ == "__main__":
    sys.exit(main())
