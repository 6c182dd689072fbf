"""A stand-in for the kubelets and the scheduler of a large cluster; no container runs.

It binds each pod that appears to one made-up node, reports it Running, and removes the object of a
deleted pod, all at once and each write with the pod's uid as precondition: a write that is late
never meets the next pod of that name. What it leaves out is what takes a real node its time:
scheduling, images, sandboxes, volumes, the end of processes. With `--state ADDRESS` it also
answers GET /state there for all pods, as a launcher does. With `--holds` it plays the
launchers of gangs of which one pod is replaced while the others wait: the hub's number is the
attempt of replica 0's newest pod, all hold, and the only steps are the pods that have been made, so
that a newcomer is progress and nothing else is news; with `--holds training` steps go on, too. No
launcher runs, holds or calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ddpjob_contract import crd
from harness.wire import METADATA, Client, Refused, Wire
from support.rest import Object, Rest

NODE = "stand-in"
METRICS_PORT = 9400
_HEARTBEAT = 5.0
_STEPS_PER_SECOND = 3
#: Written by somebody else in the same moment: the pod is gone, or another one's.
_RACES = (404, 409, 422)


class Kubelets:
    """All pods of the cluster that no scheduler of the cluster's own looks after."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._kubeconfig, self._namespaces = args.kubeconfig, set(args.namespaces.split(","))
        self._ip, self._holds = args.state or "10.0.0.1", args.holds
        self._rest = Rest(args.kubeconfig)
        self._wire = Wire(self._rest)
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hubs: dict[str, int] = {}  # the number of each job's hub, by uid
        self._made: Counter[str] = Counter()  # pods of each job so far

    async def run(self) -> None:
        node: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        self._rest.post("/api/v1/nodes", node)
        self._keep(self._beat())
        async with Client(self._kubeconfig) as client:
            while True:
                try:
                    async for event in client.watch("/api/v1/pods", accept=METADATA):
                        self._look(event["type"], event["object"]["metadata"])
                except Refused as error:  # the next watch begins with all that is there
                    print(f"stand-in kubelets: watching again: {error}", file=sys.stderr)

    def _look(self, kind: str, meta: Object) -> None:
        uid = meta["uid"]
        if meta["namespace"] not in self._namespaces:
            return
        if kind == "DELETED":
            self._started.discard(uid)
            self._ended.discard(uid)
        elif "deletionTimestamp" in meta:
            if uid not in self._ended:
                self._ended.add(uid)
                self._keep(self._end(meta))
        elif uid not in self._started:
            self._started.add(uid)
            labels = meta.get("labels", {})
            job = labels.get(crd.LABEL_JOB_UID, "")
            self._made[job] += 1
            if labels.get(crd.LABEL_REPLICA) == "0":
                self._hubs[job] = int(labels[crd.LABEL_ATTEMPT])
            self._keep(self._start(meta))

    def waiting(self, head: str) -> Object:
        """The launchers' /state where one of them may be replaced; ``head``: of the request."""
        job = re.findall(r"uid=([\w-]+)", head)[0]
        hub: Object = {"uid": job, "attempt": self._hubs.get(job, 0), "holds": True}
        steps = {"step": self._made[job], "snapshotStep": self._made[job]}
        return hub | (training(head) if self._holds == "training" else steps)

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            print(f"stand-in kubelets: {task.exception()!r}", file=sys.stderr, flush=True)

    async def _start(self, meta: Object) -> None:
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        known = {"name": meta["name"], "uid": meta["uid"]}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": known, "target": target}
        if await self._call("POST", f"{path}/binding", body):
            patch = {"metadata": {"uid": meta["uid"]}, "status": running(self._ip)}
            await self._call("PATCH", f"{path}/status", patch, "merge-patch+json")

    async def _end(self, meta: Object) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": meta["uid"]},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        await self._call("DELETE", path, options)

    async def _call(self, method: str, path: str, body: Object, kind: str = "json") -> bool:
        code = await self._wire.call(method, path, body, kind)
        if code >= 300 and code not in _RACES:
            raise RuntimeError(f"{method} {path}: {code}")
        return code < 300

    async def _beat(self) -> None:
        """Over its own connection: a silent node's pods would be evicted."""
        wire = Wire(self._rest, 1)
        while True:
            ready = {"type": "Ready", "status": "True", "reason": "StandIn", "message": ""}
            times = {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
            patch = {"status": {"conditions": [{**ready, **times}]}}
            path = f"/api/v1/nodes/{NODE}/status"
            await wire.call("PATCH", path, patch, "merge-patch+json")
            await asyncio.sleep(_HEARTBEAT)


def running(ip: str) -> Object:
    """The status of a pod whose container runs."""
    addresses = {"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}
    return {"phase": "Running", **addresses, **_status(True, "running")}


def exited(code: int) -> Object:
    """The status of a pod whose container has ended with that exit code."""
    phase = "Failed" if code else "Succeeded"
    ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
    return {"phase": phase, **_status(False, "terminated", **ended)}


def _status(ready: bool, state: str, **more: object) -> Object:
    kinds = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    container = {"name": "trainer", "image": "train", "imageID": "", "restartCount": 0}
    return {
        "startTime": now(),
        "conditions": [
            {"type": kind, "status": str(value), "lastTransitionTime": now()}
            for kind, value in kinds.items()
        ],
        "containerStatuses": [
            {**container, "ready": ready, "state": {state: {"startedAt": now(), **more}}}
        ],
    }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def training(_: str) -> Object:
    """GET /state: training goes on."""
    step = int(time.time() * _STEPS_PER_SECOND) % 10_000_000
    state = {"step": step, "totalSteps": 10**7, "loss": 1000 / step, "snapshotStep": step - 9}
    return {**state, "samplesPerSecond": 96.0}


async def answer(
    state: Callable[[str], Object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    request = await reader.readuntil(b"\r\n\r\n")
    body = json.dumps(state(request.decode())).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespaces", required=True)
    parser.add_argument("--state", default="", help="address at which all pods answer /state")
    parser.add_argument("--holds", choices=("still", "training"), help="launchers wait for others")
    args = parser.parse_args()
    kubelets = Kubelets(args)
    if args.state:
        state = kubelets.waiting if args.holds else training
        await asyncio.start_server(partial(answer, state), args.state, METRICS_PORT)
    await kubelets.run()


if __name__ == "__main__":
    asyncio.run(main())
