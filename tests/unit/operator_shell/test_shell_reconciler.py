"""The reconciler: how often it looks at a job whose writes are refused, or that is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ddpjob_contract import crd
from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.cache.store import Key, Store
from ddpjob_operator.shell.clock import Clock
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.metrics import Metrics
from ddpjob_operator.shell.reconciler import Reconciler
from ddpjob_operator.shell.workqueue import WorkQueue

pytestmark = [pytest.mark.looptime]

KEY = ("ns", "job")


class RefusingApi:
    """No status is valid to it."""

    def __init__(self) -> None:
        self.writes = 0

    async def replace(self, *_: object, **__: object) -> Any:
        self.writes += 1
        raise errors.Invalid(422, "Invalid", "status.step: must be an int32")

    async def get(self, *_: object) -> Any:
        return job()


class Taker:
    """An executor whose API server takes whatever it is given."""

    def __init__(self, store: Store, now: Callable[[], datetime]) -> None:
        self._store, self._now, self._version = store, now, 5
        self.seconds = 0.0  # that it takes

    async def carry_out(self, known: observe.Job, actions: Sequence[act.Action]) -> None:
        await asyncio.sleep(self.seconds)
        for action in actions:
            self._version += 1
            version = str(self._version)
            learnt = self._store.feedback(known.uid)
            if isinstance(action, act.WriteStatus):
                known = replace(known, status=action.status, resource_version=version)
                self._store.put_job(known)
            elif isinstance(action, act.DeletePod):
                self._store.remove_pod(action.uid)
            elif isinstance(action, act.ConfirmGone):
                read = act.QuorumRead(attempt=action.attempt, at=self._now())
                self._store.set_feedback(known.uid, replace(learnt, confirmed=read))
            elif isinstance(action, act.EnsureNetwork):
                self._store.set_feedback(known.uid, replace(learnt, network_attempt=action.attempt))
            elif isinstance(action, act.CreatePod):
                uid = f"pod{action.replica}-{action.attempt}"
                own = {"namespace": "ns", "uid": uid, "resourceVersion": version}
                meta = {**action.body["metadata"], **own}
                self._store.put_pod({**action.body, "metadata": meta}, from_watch=False)
        written = replace(self._store.feedback(known.uid), status_written_at=self._now())
        self._store.set_feedback(known.uid, written)


def job(replicas: int = 2, args: Sequence[str] = ()) -> dict[str, Any]:
    meta = {"namespace": "ns", "name": "job", "uid": "u1", "resourceVersion": "5"}
    container = {"name": "trainer", "image": "example/train:1", "args": list(args)}
    spec = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
    return {"metadata": meta, "spec": spec}


async def test_a_status_that_is_refused_is_tried_ever_more_slowly() -> None:
    api, store, metrics = RefusingApi(), Store(), Metrics()
    queue: WorkQueue[Key] = WorkQueue()
    executor = Executor(
        api,  # type: ignore[arg-type]
        store,
        None,  # type: ignore[arg-type]
        metrics,
        leads=lambda: True,
        now=lambda: datetime.now(UTC),
    )
    reconciler = Reconciler(store, queue, executor, metrics, lambda: True, Clock())
    store.put_job(job())
    queue.add(KEY)
    task = asyncio.create_task(queue.run(2, reconciler.reconcile))
    await asyncio.sleep(600)
    task.cancel()
    await asyncio.wait([task])
    assert 10 < api.writes < 50


async def test_a_gang_of_large_pods_is_made_without_a_pause() -> None:
    """In many rounds, since its pods are rendered by the megabyte: not one a second."""
    store, metrics, clock, replicas = Store(), Metrics(), Clock(), 300
    queue: WorkQueue[Key] = WorkQueue()
    taker: Any = Taker(store, clock.now)
    reconciler = Reconciler(store, queue, taker, metrics, lambda: True, clock)
    store.put_job(
        {
            **job(replicas, ["x" * 1000] * 120),
            "status": {"phase": "Starting", "attempt": 1, "membersSince": 1},
        }
    )
    read = act.QuorumRead(attempt=1, at=clock.now(), alone=True)
    store.set_feedback("u1", act.ApiFeedback(network_attempt=1, confirmed=read))
    queue.add(KEY)
    task = asyncio.create_task(queue.run(2, reconciler.reconcile))
    await asyncio.sleep(2)
    task.cancel()
    await asyncio.wait([task])
    assert len(store.pods_of("u1")) == replicas


def ended(pod: observe.Pod, code: int, version: int) -> dict[str, Any]:
    labels = {crd.LABEL_ATTEMPT: str(pod.attempt), crd.LABEL_REPLICA: str(pod.replica)}
    meta = {"namespace": "ns", "name": pod.name, "uid": pod.uid, "resourceVersion": str(version)}
    owner = {"uid": "u1", "controller": True}
    state = {"terminated": {"exitCode": code}}
    return {
        "metadata": {**meta, "labels": labels, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "trainer", "state": state}],
        },
    }


async def test_a_loss_among_many_that_are_done_is_not_held_up_by_them() -> None:
    """Each success is a write of its own, so the job is busy for as many rounds."""
    store, metrics, clock, replicas = Store(), Metrics(), Clock(), 200
    queue: WorkQueue[Key] = WorkQueue()
    taker: Any = Taker(store, clock.now)
    reconciler = Reconciler(store, queue, taker, metrics, lambda: True, clock)
    store.put_job({**job(replicas), "status": {"phase": "Starting", "attempt": 1}})
    read = act.QuorumRead(attempt=1, at=clock.now(), alone=True)
    store.set_feedback("u1", act.ApiFeedback(network_attempt=1, confirmed=read))
    queue.add(KEY)
    task = asyncio.create_task(queue.run(2, reconciler.reconcile))
    await asyncio.sleep(2)
    gang = store.pods_of("u1")
    assert len(gang) == replicas
    taker.seconds = 0.02
    for number, pod in enumerate(gang, 10_000):
        last = pod is gang[-1]
        store.put_pod(ended(pod, 1 if last else 0, number))
        queue.add(KEY)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait([task])
    found = store.snapshot(KEY)
    assert found
    assert (found.job.status["phase"], found.job.status["attempt"]) == ("Starting", 2)
    assert len(found.pods) == replicas
