"""The scheduler of the model: single pods one by one, the pods of a PodGroup all or none.

It is as Kubernetes 1.36 was seen to be, with workload-aware preemption and without a reserve: room
that a group was evicted for is anybody's. Only a cluster with ``rooms`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.cluster import Cluster, Object, group_of, stamp
from support.objects import ended, leaving

HIGH = "high"  # the one PriorityClass above the default
MISFIT = "0/2 nodes are available: 2 Insufficient cpu. no new claims to deallocate"
OTHERS = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled"


@dataclass(frozen=True, slots=True)
class Unit:
    """Pods that wait together, of which at least ``needs`` are placed at once."""

    pods: Sequence[Object]
    needs: int

    @property
    def priority(self) -> int:
        return int(self.pods[0]["spec"].get("priorityClassName") == HIGH)

    @property
    def group(self) -> str:
        return group_of(self.pods[0])


class Scheduler:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def move(self, first: int = 0) -> bool:
        """Place, preempt for or explain one unit; equals are looked at from ``first`` on."""
        if self._cluster.rooms is None:
            return False
        units = self._waiting()
        at = first % len(units) if units else 0
        in_order = sorted([*units[at:], *units[:at]], key=lambda unit: -unit.priority)
        return any(self._place(u) or self._preempt(u) or self._explain(u) for u in in_order)

    def _waiting(self) -> list[Unit]:
        """Single pods, and groups that are there and have enough pods, the oldest first."""
        pods = [pod for pod in self._cluster.pods() if _waits(pod)]
        pods.sort(key=lambda pod: int(pod["metadata"]["uid"].partition("-")[2]))
        if not self._cluster.places_groups:
            return [Unit((pod,), 1) for pod in pods]
        found = [Unit((pod,), 1) for pod in pods if not group_of(pod)]
        wanted = {g["metadata"]["name"]: g["spec"] for g in self._cluster.groups()}
        for name in dict.fromkeys(map(group_of, pods)):
            if name in wanted:
                new = [pod for pod in pods if group_of(pod) == name]
                least = wanted[name]["schedulingPolicy"]["gang"]["minCount"]
                needs = max(1, least - len(self._on_nodes(name)))
                found += [Unit(new, needs)] if len(new) >= needs else []
        return found

    def _place(self, unit: Unit) -> bool:
        places = self._places(unit)
        if len(places) < unit.needs:
            return False
        for pod, node in zip(unit.pods, places, strict=False):
            self._bind(pod, node)
        return True

    def _places(self, unit: Unit) -> list[str]:
        """Nodes for as many of its pods as fit; all that wait together fit the same ones."""
        fitting = self._cluster.fitting(unit.pods[0])
        return [node for node in fitting for _ in range(self._free(node))][: len(unit.pods)]

    def _free(self, node: str) -> int:
        used = [p for p in self._cluster.pods() if p["spec"].get("nodeName") == node]
        return max(0, self._cluster.rooms[node] - len([p for p in used if not ended(p)]))

    def _bind(self, pod: Object, node: str) -> None:
        done = {"type": "PodScheduled", "status": "True"}
        self._update(pod, {**done, "lastTransitionTime": stamp(self._cluster.now)}, node)

    def _preempt(self, unit: Unit) -> bool:
        """Evict a group of a lower priority whole, if that makes enough room."""
        if not unit.group or not self._cluster.places_groups:
            return False
        fitting = set(self._cluster.fitting(unit.pods[0]))
        free = sum(map(self._free, fitting))
        there = [p for p in self._cluster.pods() if p["spec"].get("nodeName") in fitting]
        if free + len([p for p in there if leaving(p) and not ended(p)]) >= unit.needs:
            return False
        for name in sorted({group_of(pod) for pod in there} - {"", unit.group}):
            victims = self._on_nodes(name)
            gain = len([p for p in victims if p["spec"]["nodeName"] in fitting])
            lower = victims and Unit(victims, 0).priority < unit.priority
            if lower and not any(map(leaving, victims)) and free + gain >= unit.needs:
                for pod in victims:
                    self._cluster.disrupt(pod, "PreemptionByScheduler")
                return True
        return False

    def _explain(self, unit: Unit) -> bool:
        """Tell pods that have not been looked at yet why they wait."""
        fit, explained = len(self._places(unit)), False
        for number, pod in enumerate(unit.pods):
            if not any(c["type"] == "PodScheduled" for c in pod["status"].get("conditions", ())):
                why = OTHERS if number < fit else MISFIT
                told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                self._update(pod, {**told, "message": why})
                explained = True
        return explained

    def _update(self, pod: Object, condition: Object, node: str = "") -> None:
        old = [c for c in pod["status"].get("conditions", ()) if c["type"] != "PodScheduled"]
        spec = {**pod["spec"], "nodeName": node} if node else pod["spec"]
        status = {**pod["status"], "conditions": [*old, condition]}
        self._cluster.update("pods", pod["metadata"]["name"], spec=spec, status=status)

    def _on_nodes(self, group: str) -> list[Object]:
        """Those of a group that hold a place, terminating ones too."""
        mine = [pod for pod in self._cluster.pods() if group_of(pod) == group]
        return [pod for pod in mine if pod["spec"].get("nodeName") and not ended(pod)]


def _waits(pod: Object) -> bool:
    bound = pod["spec"].get("nodeName")
    return not bound and not leaving(pod) and pod["status"].get("phase") == "Pending"
