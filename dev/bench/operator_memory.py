"""What the operator takes in memory, and how long its event loop is blocked, beside hostile jobs.

A real API server and etcd without nodes; the real operator, started again for each set of objects:
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import kubelets, programs, report
from harness.kubelets import now

from ddpjob_contract import crd
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
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
    """An ordinary pod with 20 variables."""
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


def job(namespace: str, name: str, **spec: object) -> Object:
    meta = {"namespace": namespace, "name": name}
    head = {"apiVersion": crd.API_VERSION, "kind": crd.KIND, "metadata": meta}
    return {**head, "spec": {"template": template(), **spec}}


def post_job(rest: Rest, body: Object, status: Object) -> Object:
    path = f"{JOBS}/namespaces/{body['metadata']['namespace']}/ddpjobs"
    found = rest.post(path, body)
    if status:
        found = rest.merge(f"{path}/{body['metadata']['name']}/status", {"status": status})
    return found


def post_pod(rest: Rest, job: Object, replica: int) -> None:
    seen = observe.job(job)
    pod = render.pod(seen, spec.read(seen.spec), 1, replica)
    path = f"/api/v1/namespaces/{seen.namespace}/pods"
    rest.post(path, pod)
    rest.merge(f"{path}/{pod['metadata']['name']}/status", {"status": kubelets.running("")})


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


def make_namespaces(rest: Rest, *names: str) -> None:
    for name in names:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        rest.post("/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        eventually("the ServiceAccount", lambda path=account: rest.find(path))


def fill(rest: Rest, sizes: dict[str, int]) -> None:
    """Create all objects, many at once."""
    make_namespaces(rest, "fleet", "hostile", "nothing")
    gang = sizes["pods"] // sizes["running"]
    with ThreadPoolExecutor(_POSTS) as pool:

        def all_of(what: str, work: Callable[[int], object], numbers: Iterable[int]) -> list[Any]:
            began, done = time.monotonic(), list(pool.map(work, numbers))
            print(f"{what}: {len(done)} in {time.monotonic() - began:.0f} s", flush=True)
            return done

        all_of(
            "finished jobs",
            lambda n: post_job(rest, job("fleet", f"done-{n}", replicas=gang), ended()),
            range(sizes["finished"]),
        )
        jobs = all_of(
            "running jobs",
            lambda n: post_job(rest, job("fleet", f"run-{n}", replicas=gang), running()),
            range(sizes["running"]),
        )
        all_of(
            "pods",
            lambda n: post_pod(rest, jobs[n // gang], n % gang),
            range(gang * sizes["running"]),
        )
        fillers = [hostile(unit) for unit in UNITS.values()]

        def one(n: int) -> None:
            filled = {"suspend": True, "template": template(fillers[n % len(fillers)])}
            # The last in every order: whatever a list learns from the first is wrong by then.
            post_job(rest, job("hostile", f"z-{n:04}", replicas=gang, **filled), {})

        all_of("hostile jobs", one, range(sizes["hostile"]))


class Probe(threading.Thread):
    """Asks /healthz again and again: an event loop that is blocked does not answer."""

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


def counts(metric: str, text: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of each series, by Prometheus' text format."""
    for line in re.findall(rf"^{metric}{{.*", text, re.MULTILINE):
        yield dict(re.findall(r'(\w+)="([^"]*)"', line)), float(line.rsplit(" ", 1)[1])


def requests(operator: OperatorProcess) -> Counter[str]:
    """Finished calls so far, by verb and resource."""
    found: Counter[str] = Counter()
    for fields, value in counts("ddpjob_api_requests_total", operator.probe("/metrics")[1]):
        found[f"{fields['verb']} {fields['resource']}"] += int(value)
    return found


def lists(operator: OperatorProcess) -> int:
    """How many pages of jobs it has asked for."""
    return requests(operator)["list ddpjobs"]


def cpu(operator: OperatorProcess) -> float:
    """Seconds of processor time that it has taken."""
    assert operator.process is not None
    fields = Path(f"/proc/{operator.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(plane: cluster.Cluster, namespaces: str, source: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--lease-namespace", "nothing", "--resync-seconds", str(RESYNC_SECONDS))
        parts = (str(source / part) for part in ("contract/src", "operator/src"))
        paths = os.pathsep.join((programs.program("steps"), *parts))
        operator = OperatorProcess(plane.kubeconfig, namespaces, Path(folder), *flags, paths=paths)
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
    header = "objects | code | ready s | peak MiB at start | after two resyncs | at rest"
    header += " | processor share | longest step ms | /healthz ms: median | p95 | longest"
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
