"""How long large gangs and many gangs take to be created and restarted, beside a bare script.

A real API server, etcd and controllers, the operator as it ships, and a stand-in for the kubelets
(harness/kubelets.py) that lets no pod wait. So all that is measured is writes, watches and what the
operator adds to them: creation is from the POST of the DDPJobs, a restart from the end of one
pod's container, both until status.phase is Running. The script writes the same objects.
`--fleet 10000`: nine jobs of ten have ended or are suspended, the others start, lose a pod and end
within ten minutes (harness/lives.py): how soon each is answered, the operator's memory and calls.
`--losses`: pods of gangs that run are deleted by force, one of each gang, all at once, while
launchers hold (a stand-in says so, harness/kubelets.py): from the deletion of a pod until there is
another in its place, which is the operator's share alone, and all that the operator writes until
its status tells that the newcomer trains.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import operator_memory as fleet
from harness import kubelets, report
from harness.bare import PATHS, Script
from harness.lives import Lives
from harness.wire import Client

from support import cluster
from support.operator import OperatorProcess
from support.rest import JOBS, Object, Rest

OURS, SCRIPT = "ours", "script"  # namespaces; the operator serves the first alone
_PODS = PATHS["Pod"]
_JOBS = JOBS + "/namespaces/{}/ddpjobs"
_COLLECTIONS = (_JOBS, *PATHS.values())
_WRITES = ("POST", "PUT", "PATCH", "DELETE", "create", "update", "patch", "delete")
_COUNTED = ("pods", "ddpjobs", "services", "networkpolicies")
_PATIENCE = 200.0


@dataclass
class Sample:
    """One case once. Processor seconds of the operator, or of the script, and of the API server."""

    seconds: float
    own_cpu: float
    server_cpu: float
    writes: int  # of pods, jobs and network objects, by all parties
    own_writes: int


@dataclass
class Loss:
    """Pods that were lost at once. ``seconds``: of each until its successor was created."""

    seconds: list[float]
    all_made: float  # from the first deletion
    all_run: float  # as status.phase says
    own_cpu: float
    calls: dict[str, float]  # the operator's, Leases apart


class Bench:
    """Both ways on one control plane."""

    def __init__(self, client: Client, kubeconfig: Path, operator: OperatorProcess) -> None:
        self._client, self._operator = client, operator
        self._kubeconfig, self._rest = kubeconfig, Rest(kubeconfig)
        self._number = 0

    # --- what is measured ---

    async def gang(self, way: str, size: int) -> dict[str, Sample]:
        """Create one gang and restart it."""
        job, path, watching = self._job(size), _JOBS.format(OURS), asyncio.Event()
        name, script = job["metadata"]["name"], Script(self._client, SCRIPT, job)
        create = script.create if way == SCRIPT else partial(self._running, [job])
        made = await self._sample(way, create)
        if way == SCRIPT:
            work: asyncio.Future[object] = asyncio.ensure_future(script.restart(watching))
            await watching.wait()
        else:
            since = await self._client.version(path)
            second = lambda status: status["attempt"] > 1  # noqa: E731
            work = asyncio.ensure_future(self._until_running([name], since, second))

        async def again() -> None:
            await self._fail(way, f"{name}-0")
            await work

        remade = await self._sample(way, again)
        await self._clear(way)
        return {f"create {size}": made, f"restart {size}": remade}

    async def gangs(self, way: str, count: int, size: int) -> dict[str, Sample]:
        """Create many gangs at once."""
        jobs = [self._job(size) for _ in range(count)]

        async def create() -> None:
            if way == OURS:
                await self._running(jobs)
                return
            scripts = [Script(self._client, SCRIPT, job) for job in jobs]
            # One watch for all, as every script has it that makes more than one gang.
            await Script.create_all(self._client, SCRIPT, scripts)

        sample = await self._sample(way, create)
        await self._clear(way)
        return {f"create {count} x {size}": sample}

    async def losses(self, count: int, size: int, repeats: int) -> list[Loss]:
        """Lose one pod in each of these gangs, again and again; the first time that of the hub."""
        jobs = [self._job(size) for _ in range(count)]
        since = await self._client.version(_JOBS.format(OURS))
        await self._running(jobs)
        names = [job["metadata"]["name"] for job in jobs]
        await self._until_reported(names, since, size)
        found = []
        for number in range(repeats):
            pods = [f"{name}-{number * size // repeats}" for name in names]
            try:
                async with asyncio.timeout(_PATIENCE):
                    found.append(await self._lose(names, pods, size + number + 1))
            except TimeoutError:
                jobs = (await self._client.call("GET", _JOBS.format(OURS)))["items"]
                print(json.dumps([job["status"] for job in jobs[:3]]), file=sys.stderr)
                raise
            made = f"made {found[-1].all_made:.2f} s, run {found[-1].all_run:.2f} s"
            print(f"{count} x {size}, replica {pods[0].rpartition('-')[2]}: {made}", flush=True)
        await self._clear(OURS)
        return found

    async def fleet(self, size: int, seconds: float) -> dict[str, Any]:
        """Fill the cluster with jobs that have ended or wait, and let a tenth as many live."""
        before = self._job(2)
        await self._lives(OURS, [before], 30)  # imports, connections, caches
        path = f"{_JOBS.format(OURS)}/{before['metadata']['name']}"
        status = (await self._client.call("GET", path))["status"]
        self._operator.terminate()
        await asyncio.gather(*(self._post_idle(n % 3, status) for n in range(size - size // 10)))
        self._operator.start()
        self._operator.wait_ready()
        self._operator.wait_leading()
        asked = -1.0
        while asked != (asked := self._counters(OURS)[3]):  # noqa: ASYNC110 - theirs
            await asyncio.sleep(5)  # it tells of those that are suspended
        found: dict[str, Any] = {"at rest": fleet.memory(self._operator)}
        for way in (OURS, SCRIPT):
            jobs = [self._job(2) for _ in range(size // 10)]
            found[way] = await self._lives(way, jobs, seconds)
            print(json.dumps(found), flush=True)
        return found

    async def _post_idle(self, kind: int, status: Object) -> None:
        job, path = self._job(2), _JOBS.format(OURS)
        job["spec"]["suspend"] = not kind
        await self._client.text("POST", path, job)
        if kind:
            ended = {"status": {**status, "phase": ("Succeeded", "Failed")[kind - 1]}}
            await self._client.text("PATCH", f"{path}/{job['metadata']['name']}/status", ended)

    async def _lives(self, way: str, jobs: list[Object], seconds: float) -> dict[str, Any]:
        asked = fleet.requests(self._operator)
        async with Client(self._kubeconfig) as outside:
            lives = Lives(jobs, way, outside, self._client if way == SCRIPT else None)
            sample = await self._sample(way, partial(lives.run, seconds), seconds)
        found = {"delays": lives.delays(), **asdict(sample)}
        if way == SCRIPT:
            return found
        calls = (fleet.requests(self._operator) - asked).items()
        rates = {what: round(count / sample.seconds, 3) for what, count in calls}
        return {**found, **fleet.memory(self._operator), "calls per second": rates}

    # --- how ---

    async def _lose(self, names: list[str], pods: list[str], made: int) -> Loss:
        """``made``: pods of each gang from its beginning, with the one to come."""
        await asyncio.sleep(1.0)  # what the one before has caused is over
        pods_path, jobs_path = _PODS.format(OURS), _JOBS.format(OURS)
        since = [await self._client.version(path) for path in (pods_path, jobs_path)]
        spent, asked = fleet.cpu(self._operator), fleet.requests(self._operator)
        deletions = asyncio.gather(
            *(self._client.text("DELETE", f"{pods_path}/{p}?gracePeriodSeconds=0") for p in pods)
        )
        gone: dict[str, float] = {}
        there: dict[str, float] = {}
        running = asyncio.create_task(self._until_reported(names, since[1], made))
        async with aclosing(self._client.watch(pods_path, since[0], kubelets.METADATA)) as events:
            async for event in events:
                times = {"DELETED": gone, "ADDED": there}.get(event["type"])
                if times is not None:
                    times[event["object"]["metadata"]["name"]] = time.monotonic()
                if len(there) == len(pods):
                    break
        assert gone.keys() == there.keys() == set(pods), "others are replaced, too"
        await deletions
        began, run = min(gone.values()), await running
        calls = fleet.requests(self._operator) - asked
        return Loss(
            [round(there[pod] - gone[pod], 3) for pod in pods],
            round(max(there.values()) - began, 3),
            round(run - began, 3),
            round(fleet.cpu(self._operator) - spent, 2),
            {what: count for what, count in calls.items() if "leases" not in what},
        )

    async def _until_reported(self, names: list[str], since: str, made: int) -> float:
        """Wait until each job's status tells that it holds, runs and has made so many pods."""

        def reported(status: Object) -> bool:
            return bool(status.get("holds")) and status.get("progress", {}).get("step") == made

        return await self._until_running(names, since, reported)

    async def _until_running(
        self, names: Iterable[str], since: str, good: Callable[[Object], bool]
    ) -> float:
        """Wait until each job runs and its status is good; return when the last began to run."""
        runs: dict[str, float] = {}
        left = set(names)
        async with aclosing(self._client.watch(_JOBS.format(OURS), since)) as events:
            async for event in events:
                job = event["object"]
                name, status = job["metadata"]["name"], job.get("status", {})
                if status.get("phase") != "Running":
                    runs.pop(name, None)
                    continue
                runs.setdefault(name, time.monotonic())
                if good(status):
                    left.discard(name)
                if not left:
                    break
        return max(runs[name] for name in names)

    def _job(self, size: int) -> Object:
        self._number += 1
        return fleet.job(OURS, f"gang-{self._number}", replicas=size, nprocPerNode=1)

    async def _sample(
        self, way: str, work: Callable[[], Awaitable[None]], expected: float = 0.0
    ) -> Sample:
        before, began = self._counters(way), time.monotonic()
        async with asyncio.timeout(expected + _PATIENCE):
            await work()
        seconds = time.monotonic() - began
        after = self._counters(way)
        own, server, writes, own_writes = (b - a for a, b in zip(before, after, strict=True))
        return Sample(
            round(seconds, 3), round(own, 2), round(server, 2), int(writes), int(own_writes)
        )

    def _counters(self, way: str) -> tuple[float, float, float, float]:
        text = self._rest.call("GET", "/metrics")["message"]
        cpu = re.search(r"^process_cpu_seconds_total (\S+)", text, re.MULTILINE)
        assert cpu is not None
        all_writes = written("apiserver_request_total", text)
        if way == SCRIPT:
            return time.process_time(), float(cpu[1]), all_writes, self._client.writes
        own = written("ddpjob_api_requests_total", self._operator.probe("/metrics")[1])
        return fleet.cpu(self._operator), float(cpu[1]), all_writes, own

    async def _fail(self, namespace: str, pod: str) -> None:
        path = f"{_PODS.format(namespace)}/{pod}/status"
        await self._client.text("PATCH", path, {"status": kubelets.exited(1)})

    async def _running(self, jobs: list[Object]) -> None:
        """Post them, until all run."""
        path = _JOBS.format(OURS)
        since = await self._client.version(path)
        posts = [self._client.text("POST", path, job) for job in jobs]
        names = {job["metadata"]["name"] for job in jobs}
        await asyncio.gather(self._until_running(names, since, lambda _: True), *posts)

    async def _clear(self, way: str) -> None:
        """Remove all and wait until it is gone; the controllers' work on it counts for nobody."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        for collection in _COLLECTIONS:
            await self._client.text("DELETE", collection.format(way), options)
        for collection in _COLLECTIONS:
            path = collection.format(way) + "?limit=1"
            async with asyncio.timeout(_PATIENCE):
                while (await self._client.call("GET", path))["items"]:  # noqa: ASYNC110 - theirs
                    await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)


def written(metric: str, text: str) -> float:
    """Successful writes of what a gang is made of."""
    return sum(
        value
        for of, value in fleet.counts(metric, text)
        if of["verb"] in _WRITES and of["resource"] in _COUNTED and of["code"][0] == "2"
    )


# --- the frame ---


async def measure(args: Any, plane: cluster.Cluster, operator: OperatorProcess) -> dict[str, Any]:
    async with Client(plane.kubeconfig) as client:
        bench = Bench(client, plane.kubeconfig, operator)
        if args.losses:
            await bench.losses(1, 5, 2)  # imports, connections, caches
            cases = ((case, case.rpartition("x")) for case in args.cases)
            return {
                case: await bench.losses(int(count or 1), int(size), args.repeats)
                for case, (count, _, size) in cases
            }
        if args.fleet:
            return await bench.fleet(args.fleet, args.seconds)
        await bench.gang(OURS, 5)  # imports, connections, caches
        await bench.gang(SCRIPT, 5)
        found: dict[str, dict[str, list[Sample]]] = {}
        for case in args.cases:
            for number in range(args.repeats):
                ways = (OURS, SCRIPT) if number % 2 == 0 else (SCRIPT, OURS)
                for way in ways:
                    count, _, size = case.rpartition("x")
                    samples = (
                        await bench.gangs(way, int(count), int(size))
                        if count
                        else await bench.gang(way, int(size))
                    )
                    for name, sample in samples.items():
                        found.setdefault(name, {}).setdefault(way, []).append(sample)
                        print(f"{name}, {way}: {sample.seconds:.2f} s", flush=True)
        return found


def rows(found: dict[str, dict[str, list[Sample]]]) -> list[list[object]]:
    table: list[list[object]] = []
    for case, ways in found.items():
        ours, script = ways[OURS], ways[SCRIPT]
        ratios = [a.seconds / b.seconds for a, b in zip(ours, script, strict=True)]
        seconds = [report.spread([s.seconds for s in ways[way]], 2) for way in (OURS, SCRIPT)]
        row: list[object] = [case, *seconds, report.spread(ratios, 2)]
        for field, form in (
            ("own_cpu", ".2f"),
            ("server_cpu", ".1f"),
            ("own_writes", ".0f"),
            ("writes", ".0f"),
        ):
            medians = (statistics.median(getattr(s, field) for s in ways[w]) for w in ways)
            row.append(" / ".join(format(value, form) for value in medians))
        table.append(row)
    return table


def options() -> Any:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases", help="sizes of gangs; AxB: A gangs of B (100,1000,200x5; losses: 1000,100x4)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fleet", type=int, help="so many jobs, of which a tenth lives")
    parser.add_argument("--seconds", type=float, default=600, help="of the fleet's lives (600)")
    parser.add_argument("--losses", action="store_true", help="one pod of each gang is replaced")
    parser.add_argument(
        "--source",
        type=Path,
        default=report.ROOT,
        metavar="DIR",
        help="measure the operator of another checkout",
    )
    args = parser.parse_args()
    args.cases = args.cases or ("1000,100x4" if args.losses else "100,1000,200x5")
    if args.quick:
        args.cases, args.repeats, args.seconds = "20,10x5", 1, 60
        args.fleet = args.fleet and 100
    args.cases = args.cases.split(",")
    return args


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster must go all the same
    facts = report.machine()
    name = f"t-scale-{os.getpid()}"
    nodes: subprocess.Popen[bytes] | None = None
    try:
        plane = cluster.up(name, "--nodes", "0")
        plane.apply_crd()
        rest = Rest(plane.kubeconfig)
        fleet.make_namespaces(rest, OURS, SCRIPT)
        with tempfile.TemporaryDirectory() as folder:
            holds = "training" if args.fleet else "still" if args.losses else ""
            address = rest.url.hostname if holds else ""
            nodes = stand_in(plane.kubeconfig, address, *(("--holds", holds) if holds else ()))
            paths = os.pathsep.join(str(args.source / p) for p in ("contract/src", "operator/src"))
            with OperatorProcess(plane.kubeconfig, OURS, Path(folder), paths=paths) as operator:
                operator.wait_leading()
                try:
                    found = asyncio.run(measure(args, plane, operator))
                except BaseException:
                    print(operator.log()[-3000:], file=sys.stderr)
                    raise
                operator.terminate()
    finally:
        if nodes:
            nodes.kill()
            nodes.wait()
        cluster.down(name)
    facts["load_after"] = round(os.getloadavg()[0], 2)
    tell(args, facts, found)
    return 0


def stand_in(kubeconfig: Path, address: str | None, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness.kubelets", "--kubeconfig", str(kubeconfig)]
    command += ["--namespaces", f"{OURS},{SCRIPT}", "--state", address or "", *more]
    paths = [str(report.ROOT / part) for part in ("dev/bench", "tests", "dev/devcluster/src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, env=environment)


def tell(args: Any, facts: dict[str, Any], found: dict[str, Any]) -> None:
    if args.losses:
        tell_losses(facts, found)
        kept = {case: [asdict(loss) for loss in losses] for case, losses in found.items()}
        report.finish("losses", facts, {"cases": kept}, args.json)
        return
    if args.fleet:
        tell_fleet(found)
        report.finish(
            "fleet", facts, {"jobs": args.fleet, "seconds": args.seconds, **found}, args.json
        )
        return
    header = "case | s: ours | s: script | ratio | own processor s: ours / script"
    header += " | API server's processor s | own writes | writes of all"
    print("\n" + report.table(header, rows(found)))
    print(f"\nload before {facts['load_before']}, after {facts['load_after']}")
    samples = {
        c: {w: [asdict(s) for s in all_] for w, all_ in ways.items()} for c, ways in found.items()
    }
    report.finish("scale", facts, {"repeats": args.repeats, "cases": samples}, args.json)


def tell_fleet(found: dict[str, Any]) -> None:
    rows = []
    for stage, one in found[OURS]["delays"].items():
        script = found[SCRIPT]["delays"][stage]  # empty: it writes nothing then
        both = [
            f"{of[what]:.3f}" if of else "-" for of in (one, script) for what in ("median", "p95")
        ]
        ratio = f"{one['p95'] / script['p95']:.2f}" if script else "-"
        rows.append([stage, one["n"], *both, ratio])
    header = "stage | n | s: ours | p95 | s: script | p95 | ratio of p95"
    print("\n" + report.table(header, rows))


def tell_losses(facts: dict[str, Any], found: dict[str, list[Loss]]) -> None:
    rows = []
    for case, losses in found.items():
        lost = len(losses[0].seconds)
        columns = ([s for loss in losses for s in loss.seconds],)
        columns += tuple(
            [getattr(loss, f) for loss in losses] for f in ("all_made", "all_run", "own_cpu")
        )
        each = [sum(writes(loss.calls).values()) / lost for loss in losses]
        rows.append(
            [case, len(losses), *(report.spread(c, 2) for c in columns), report.spread(each, 1)]
        )
    header = ("case", "n", "s to each new pod", "all new pods", "all run", "own processor s")
    print("\n" + report.table((*header, "own writes per job"), rows))
    for case, losses in found.items():
        for what in sorted({what for loss in losses for what in writes(loss.calls)}):
            counts = [loss.calls.get(what, 0.0) / len(loss.seconds) for loss in losses]
            print(f"{case}: {what}, per job: {report.spread(counts, 2)}")
    print(f"\nload before {facts['load_before']}, after {facts['load_after']}")


def writes(calls: dict[str, float]) -> dict[str, float]:
    return {what: count for what, count in calls.items() if what.split()[0] in _WRITES}


if __name__ == "__main__":
    sys.exit(main())
