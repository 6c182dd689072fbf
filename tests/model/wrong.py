"""Planners that are wrong on purpose: what a harness does not catch in these it proves nothing.

Each is the real planner with one rule broken, as operators in the field have broken it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ddpjob_operator.core.actions import (
    ApiFeedback,
    CreatePod,
    DeletePod,
    EnsureNetwork,
    Plan,
    QuorumRead,
    WriteStatus,
)
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job, Pod
from ddpjob_operator.core.objects.status import decided
from ddpjob_operator.core.plan import plan


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of plan(); the only place that knows their order."""

    job: Job
    pods: Sequence[Pod]
    feedback: ApiFeedback
    now: datetime
    nodes: Nodes | None

    def answer(self) -> Plan:
        return plan(self.job, self.pods, self.feedback, self.now, self.nodes)

    @property
    def attempt(self) -> int:
        return int(self.job.status.get("attempt", 0))

    def sure(self) -> Question:
        """Whoever believes his cache."""
        return replace(self, feedback=replace(self.feedback, confirmed=self.belief()))

    def belief(self) -> QuorumRead:
        mine = [p.replica for p in self.pods if p.attempt == self.attempt]
        everybody = frozenset(range(self.job.spec.get("replicas", 1)))
        here = frozenset(r for r in mine if r is not None)
        return QuorumRead(self.attempt, self.now, True, True, everybody, here)


def creates_before_the_intent(*args: Any) -> Plan:
    """Makes the pods first and stores what for afterwards."""
    asked = Question(*args)
    found = asked.answer()
    status = _status(found)
    if status is None or status.get("phase") != "Starting" or asked.attempt == 0:
        return found
    network = replace(asked.feedback, network_attempt=0, confirmed=asked.belief())
    network = network.begin(asked.attempt)
    ahead = replace(asked, job=replace(asked.job, status=status), feedback=network)
    first = ahead.answer().actions
    made = replace(network, network_attempt=asked.attempt)
    then = replace(ahead, feedback=made).answer().actions
    early = [one for one in (*first, *then) if isinstance(one, (EnsureNetwork, CreatePod))]
    return Plan((*early, *found.actions), found.requeue_after)


def deletes_before_the_intent(*args: Any) -> Plan:
    """Removes the broken gang first and counts afterwards, from what is left."""
    asked = Question(*args)
    found = asked.answer()
    status = _status(found)
    if status is None or status.get("phase") != "Restarting":
        return found
    mine = [DeletePod(p.name, p.uid, None) for p in asked.pods if p.attempt == asked.attempt]
    return Plan((*mine, *found.actions), found.requeue_after)


def skips_the_barrier(*args: Any) -> Plan:
    """Does not wait until the old pods are gone, and asks nobody; a free name comes first.

    One that is taken by a pod of ours would stop the others.
    """
    asked = Question(*args).sure()
    here = [pod for pod in asked.pods if pod.attempt == asked.attempt or not pod.deleting]
    taken, found = {pod.name for pod in asked.pods}, replace(asked, pods=here).answer()
    late = lambda a: isinstance(a, CreatePod) and a.body["metadata"]["name"] in taken  # noqa: E731
    return replace(found, actions=tuple(sorted(found.actions, key=late)))


def believes_its_cache(*args: Any) -> Plan:
    """Takes a pod that its cache does not show for one that has vanished."""
    asked = Question(*args)
    return (asked.sure() if asked.job.status.get("phase") == "Running" else asked).answer()


def counts_again_after_a_crash(*args: Any) -> Plan:
    """Remembers in its process which failed pods it has counted, and counts all others."""
    asked = Question(*args)
    if asked.feedback.confirmed or asked.job.status.get("phase") != "Restarting":
        return asked.answer()
    failed = [p for p in asked.pods if p.trainer.exit_code not in (None, 0)]
    again = [replace(pod, attempt=asked.attempt) for pod in failed]
    rest = [pod for pod in asked.pods if pod not in failed]
    return replace(asked, pods=[*again, *rest]).answer()


def counts_every_pod(*args: Any) -> Plan:
    """Three pods die of one cause, three restarts are counted."""
    asked = Question(*args)
    found = asked.answer()
    status = _status(found)
    if status is None or not _grows(asked, status):
        return found
    ended = [p for p in asked.pods if p.trainer.exit_code not in (None, 0)]
    restarts = dict(status["restarts"])
    restarts["total"] += len(ended)
    return _changed(found, WriteStatus, status={**status, "restarts": restarts})


def leaves_the_end(*args: Any) -> Plan:
    """Looks at the pods of a finished job, and starts it again when they are gone."""
    asked = Question(*args)
    if asked.job.status.get("phase") != "Succeeded":
        return asked.answer()
    status = {**asked.job.status, "phase": "Running", "succeededReplicas": ""}
    return replace(asked, job=replace(asked.job, status=status), pods=()).sure().answer()


def deletes_without_grace(*args: Any) -> Plan:
    """Removes the object and takes the process for dead."""
    return _changed(Question(*args).answer(), DeletePod, grace_seconds=0)


def says_nothing(*args: Any) -> Plan:
    """Never tells why a job does not run."""
    asked = Question(*args)
    found = asked.answer()
    status = _status(found)
    if status is None:
        return found
    told = [c for c in status.get("conditions") or () if c["type"] != "Stalled"]
    status["conditions"] = told
    if decided(status) == decided(asked.job.status):
        return Plan()  # the ledger alone is no news
    return _changed(found, WriteStatus, status=status)


def books_twice(*args: Any) -> Plan:
    """Books the time since the write before the last one."""
    found = Question(*args).answer()
    status = _status(found)
    if status is None or "ledger" not in status:
        return found
    ledger = status["ledger"]
    sums = {state: 2 * seconds for state, seconds in ledger["podSeconds"].items()}
    return _changed(found, WriteStatus, status={**status, "ledger": {**ledger, "podSeconds": sums}})


def gives_up_waiting(*args: Any) -> Plan:
    """Forgets the pods of a restart that it cannot make at once."""
    asked = Question(*args)
    if asked.job.status.get("phase") == "Restarting" and asked.attempt > 1:
        return Plan()
    return asked.answer()


def makes_again_what_is_missing(*args: Any) -> Plan:
    """Takes itself for the process that began to make the pods of an attempt."""
    asked = Question(*args)
    return replace(asked, feedback=asked.feedback.begin(asked.attempt)).answer()


def raises_floors_by_its_cache(*args: Any) -> Plan:
    """Replaces with a lost pod those that its cache does not show."""
    asked = Question(*args)
    lost = any(pod.trainer.exit_code for pod in asked.pods)
    return (asked.sure() if lost and asked.job.status.get("phase") == "Running" else asked).answer()


def _status(found: Plan) -> dict[str, Any] | None:
    writes = [one for one in found.actions if isinstance(one, WriteStatus)]
    return dict(writes[0].status) if writes else None


def _changed(found: Plan, kind: type[DeletePod | WriteStatus], **fields: Any) -> Plan:
    """The plan with fields of its actions of one kind replaced."""
    changed = (replace(a, **fields) if isinstance(a, kind) else a for a in found.actions)
    return replace(found, actions=tuple(changed))


def _grows(asked: Question, status: dict[str, Any]) -> bool:
    old = (asked.job.status.get("restarts") or {}).get("total", 0)
    return bool(status["restarts"]["total"] > old)
