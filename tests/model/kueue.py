"""A small Kueue in the model: one quota of pods, queues by priority and age, preemption.

It reads and writes Workloads as v0.17 does, and holds the operator to the bargain: no pod without
quota, and no quota given back while a pod, or a process of one, is left.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.plan import plan as real_plan
from model.cluster import NAMESPACE, Cluster, Key, Object, controller
from model.operators import Planner
from model.story import Fate, World, finishes, job_body
from support import workloads
from support.invariants import Violation, Write
from support.objects import ended, owner, uid_of

WORKLOADS = "workloads"
PRIORITIES = {"low": 1, "high": 100}


def queued(name: str, priority: str = "", queue: str = "team", **spec: Any) -> dict[str, Any]:
    """A DDPJob with the labels of a queue."""
    labels = {workloads.QUEUE: queue}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = priority
    body = job_body(name, **spec)
    return {**body, "metadata": {**body["metadata"], "labels": labels}}


class Kueue:
    """``quota``: pods that may be admitted at once; ``preempts``: lower priorities give way."""

    def __init__(self, cluster: Cluster, quota: int) -> None:
        self.cluster, self.quota, self.preempts, self.asleep = cluster, quota, True, False
        cluster.create(
            "resourceflavors", {"kind": "ResourceFlavor", "metadata": {"name": "default"}}
        )
        for name, value in PRIORITIES.items():
            body = {"kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
            cluster.create("workloadpriorityclasses", body)

    def all(self) -> list[Object]:
        """By priority, then by age."""
        found = [o for (plural, _, _), o in self.cluster.objects.items() if plural == WORKLOADS]
        age = lambda o: int(o["metadata"]["uid"].rpartition("-")[2])  # noqa: E731
        return sorted(found, key=lambda o: (-int(o["spec"].get("priority", 0)), age(o)))

    def of(self, job: str) -> Object | None:
        mine = self.cluster.job(job)
        found = (o for o in self.all() if mine and controller(o) == uid_of(mine))
        return next(found, None)

    def used(self) -> int:
        return sum(_count(o) for o in self.all() if _reserved(o))

    def move(self) -> bool:
        """Do one thing: admit, evict what was deactivated, or preempt."""
        if self.asleep:
            return False
        for found in self.all():
            if found["spec"].get("active") is False and not workloads.true(found, "Evicted"):
                return self.play(found, workloads.evict, "Deactivated")
        waiting = [o for o in self.all() if self._waits(o)]
        if not waiting:
            return False
        first = waiting[0]
        if self.used() + _count(first) <= self.quota:
            return self.play(first, workloads.admit, "default")
        weaker = [o for o in self.all() if _reserved(o) and _priority(o) < _priority(first)]
        going = any(workloads.true(o, "Evicted") for o in self.all() if _reserved(o))
        if weaker and self.preempts and not going and _count(first) <= self.quota:
            return self.play(weaker[-1], workloads.evict)
        if not workloads.condition(first, "QuotaReserved"):
            return self.play(first, workloads.pending)
        return False

    def play(self, found: Object, what: Any, *args: Any) -> bool:
        """Write a Workload's status."""
        new = what(copy.deepcopy(dict(found)), self.cluster.now, *args)
        self.cluster.update(WORKLOADS, found["metadata"]["name"], status=new["status"])
        return True

    def activate(self, found: Object, active: bool) -> None:
        spec = {**found["spec"], "active": active}
        self.cluster.update(WORKLOADS, found["metadata"]["name"], spec=spec)

    def _waits(self, found: Object) -> bool:
        return not (
            _reserved(found)
            or workloads.true(found, "Finished")
            or found["spec"].get("active") is False
        )


class QueueWorld(World):
    """A world with a Kueue in it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        quota: int,
        *,
        fate: Fate = finishes,
        planner: Planner = real_plan,
    ) -> None:
        cluster = Cluster()
        self.kueue = Kueue(cluster, quota)
        self.held_to = 0
        super().__init__(loop, fate=fate, planner=planner, cluster=cluster)

    def _move(self) -> bool:
        return super()._move() or self.kueue.move()

    def verify(self) -> None:
        history, states = self.cluster.history, self.cluster.states
        for at in range(self.held_to, len(history)):
            after = states[at + 1] if at + 1 < len(states) else self.cluster.objects
            self._hold(history[at], states[at], after)
        self.held_to = len(history)
        super().verify()

    def _hold(self, write: Write, before: dict[Key, Object], after: dict[Key, Object]) -> None:
        if not write.by or self.state.deposed:
            return
        if write.plural == "pods" and write.kind == "ADDED":
            job = before.get((crd.PLURAL, NAMESPACE, _job_of(write.obj)))
            asked = job is not None and workloads.QUEUE in (job["metadata"].get("labels") or {})
            mine = [o for o in _workloads(before) if controller(o) == owner(write.obj)]
            if asked and not any(map(_reserved, mine)):
                name = write.obj["metadata"]["name"]
                raise Violation("queue_no_pod_without_quota", f"{name} is made without quota")
        if write.plural == WORKLOADS:
            key = (WORKLOADS, NAMESPACE, write.obj["metadata"]["name"])
            old, new = before.get(key), after.get(key)
            if old is not None and _reserved(old) and not (new is not None and _reserved(new)):
                self._hold_to_last_pod(controller(old), before)

    def _hold_to_last_pod(self, job: str | None, before: dict[Key, Object]) -> None:
        pods = [o for (plural, _, _), o in before.items() if plural == "pods" and owner(o) == job]
        left = [o["metadata"]["name"] for o in pods if not ended(o)]
        forced = self.cluster.forced | self.state.tampered
        left += [
            pod["metadata"]["name"]
            for uid, pod in self.cluster.processes.items()
            if owner(pod) == job and uid not in forced
        ]
        if left:
            what = f"quota is given back, and {sorted(set(left))} are left"
            raise Violation("queue_quota_after_the_last_pod", what)

    def heal(self) -> None:
        super().heal()
        self.kueue.quota, self.kueue.asleep = max(self.kueue.quota, 4), False
        for found in self.kueue.all():
            if found["spec"].get("active") is False:
                self.kueue.activate(found, True)

    def label(self, name: str, key: str, value: str | None) -> None:
        """The user writes a label of a job, or takes it off."""
        job = self.cluster.job(name)
        if job is not None and not self.over(name):
            labels = {k: v for k, v in (job["metadata"].get("labels") or {}).items() if k != key}
            labels |= {} if value is None else {key: value}
            self.cluster.update(crd.PLURAL, name, metadata={**job["metadata"], "labels": labels})


def _workloads(state: dict[Key, Object]) -> list[Object]:
    return [o for (plural, _, _), o in state.items() if plural == WORKLOADS]


def _reserved(found: Object) -> bool:
    obj = dict(found)
    return workloads.true(obj, "QuotaReserved") and not workloads.true(obj, "Finished")


def _count(found: Object) -> int:
    reclaimed = (found.get("status") or {}).get("reclaimablePods") or ({"count": 0},)
    return int(found["spec"]["podSets"][0]["count"]) - int(reclaimed[0]["count"])


def _priority(found: Object) -> int:
    return int(found["spec"].get("priority", 0))


def _job_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][crd.LABEL_JOB_NAME])
