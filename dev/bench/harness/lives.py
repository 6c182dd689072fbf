"""Jobs that live a whole life: each starts, loses a pod and ends, all evenly over a given time.

The operator reacts, or a script that creates the same pods: when a job is due, and when one is
gone. Delays are read from one watch of pods and one of jobs, on one clock: from the event that
shows the change to the event that shows the write that answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence

from harness import kubelets, report
from harness.bare import PATHS, Script
from harness.wire import Client, Gone
from support.rest import JOBS, Object

#: From the job to its first pod, from a pod's end to the next one, from the last exit to the phase.
STAGES = START, LOSS, END = ("start", "loss", "end")


class Lives:
    """``client`` is the script's, None without one; ``outside`` plays users and nodes."""

    def __init__(
        self, jobs: Sequence[Object], namespace: str, outside: Client, client: Client | None
    ) -> None:
        self._jobs = {job["metadata"]["name"]: job for job in jobs}
        self._pods_path = PATHS["Pod"].format(namespace)
        self._jobs_path = f"{JOBS}/namespaces/{namespace}/ddpjobs"
        self._outside = outside
        scripted = self._jobs.items() if client else ()
        self._scripts = {name: Script(client, namespace, job) for name, job in scripted}
        self._since: dict[tuple[str, str], float] = {}  # by stage, and name of the job or pod
        self._until: dict[tuple[str, str], float] = {}
        self._exited: defaultdict[str, set[str]] = defaultdict(set)
        self._left = set(self._jobs)  # not ended yet
        self._over = asyncio.Event()

    async def run(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as self._group:
            watches = [
                self._group.create_task(self._watch(path, await self._outside.version(path)))
                for path in (self._pods_path, self._jobs_path)
            ]
            began, third = time.monotonic(), seconds / 3
            for number, name in enumerate(self._jobs):
                at = began + third * number / len(self._jobs)
                self._group.create_task(self._live(number, name, at, third))
            await self._over.wait()
            for watch in watches:
                watch.cancel()

    def delays(self) -> dict[str, dict[str, float]]:
        """Of each stage."""
        found: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for key in self._since.keys() & self._until.keys():
            found[key[0]].append(self._until[key] - self._since[key])
        return {stage: report.summary(delays) for stage, delays in found.items()}

    async def _live(self, number: int, name: str, at: float, third: float) -> None:
        size = self._jobs[name]["spec"]["replicas"]
        await _wait_until(at)
        if script := self._scripts.get(name):
            self._since[START, name] = time.monotonic()
            await script.post([*script.network, *script.pods])
        else:
            await self._outside.text("POST", self._jobs_path, self._jobs[name])
        await _wait_until(at + third)
        lost = f"{self._pods_path}/{name}-{number % size}"
        await self._outside.text("DELETE", f"{lost}?gracePeriodSeconds=0")
        await _wait_until(at + 2 * third)
        for replica in range(size):
            path, status = f"{self._pods_path}/{name}-{replica}/status", kubelets.exited(0)
            while not await self._patched(path, status):  # noqa: ASYNC110 - theirs
                await asyncio.sleep(1.0)

    async def _patched(self, path: str, status: Object) -> bool:
        """Write the status of a pod; False: it is not replaced yet, and LOSS says how late."""
        with contextlib.suppress(Gone):
            await self._outside.text("PATCH", path, {"status": status})
            return True
        return False

    async def _watch(self, path: str, since: str) -> None:
        async for event in self._outside.watch(path, since):
            now, found = time.monotonic(), event["object"]
            name, phase = found["metadata"]["name"], found.get("status", {}).get("phase")
            if found["kind"] == "Pod":
                self._look_at_pod(now, event["type"], name, phase)
            elif event["type"] == "ADDED":
                self._since[START, name] = now
            elif phase == "Succeeded":
                self._until.setdefault((END, name), now)
                self._end(name)

    def _look_at_pod(self, now: float, event: str, pod: str, phase: str) -> None:
        name, _, replica = pod.rpartition("-")
        if event == "ADDED":
            answers = (LOSS, pod) if (LOSS, pod) in self._since else (START, name)
            self._until.setdefault(answers, now)
        elif event == "DELETED" and phase == "Running":
            self._since.setdefault((LOSS, pod), now)
            if script := self._scripts.get(name):
                self._group.create_task(script.post([script.pods[int(replica)]]))
        elif phase == "Succeeded":
            self._exited[name].add(pod)
            if len(self._exited[name]) == self._jobs[name]["spec"]["replicas"]:
                self._since.setdefault((END, name), now)
                if self._scripts:  # nobody writes of its end
                    self._end(name)

    def _end(self, name: str) -> None:
        self._left.discard(name)
        if not self._left:
            self._over.set()


async def _wait_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
