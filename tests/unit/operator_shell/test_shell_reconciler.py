"""The reconciler: how often it looks at a job whose writes are refused, or that is large."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.cache.store import Key, Store
from ddpjob_operator.shell.clock import Clock
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.metrics import Metrics
from ddpjob_operator.shell.reconciler import Reconciler
from ddpjob_operator.shell.workqueue import WorkQueue
from support import stored

pytestmark = [pytest.mark.looptime]

KEY = ("ns", "job")
CLOCK = Clock()


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

    def __init__(self, store: Store) -> None:
        self._store, self._version = store, 5
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
                if action.begins:
                    self._store.set_feedback(known.uid, learnt.begin(known.status["attempt"]))
            elif isinstance(action, act.DeletePod):
                self._store.remove_pod(action.uid)
            elif isinstance(action, act.ConfirmGone):
                read = act.QuorumRead(attempt=action.attempt, at=CLOCK.now())
                self._store.set_feedback(known.uid, replace(learnt, confirmed=read))
            elif isinstance(action, act.EnsureNetwork):
                self._store.set_feedback(known.uid, replace(learnt, network_attempt=action.attempt))
            elif isinstance(action, act.CreatePod):
                uid = f"{known.uid}-{action.replica}-{action.attempt}"
                own = {"namespace": "ns", "uid": uid, "resourceVersion": version}
                meta = {**action.body["metadata"], **own}
                self._store.put_pod({**action.body, "metadata": meta}, from_watch=False)
        written = replace(self._store.feedback(known.uid), status_written_at=CLOCK.now())
        self._store.set_feedback(known.uid, written)


def job(replicas: int = 2, args: Sequence[str] = ()) -> dict[str, Any]:
    container = {"name": "trainer", "image": "example/train:1", "args": list(args)}
    spec = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
    return {**stored.job(5), "spec": spec}


def starting(replicas: int, args: Sequence[str] = ()) -> Store:
    """A gang of which no pod is there yet, and nothing else in its way."""
    store = Store()
    status = {"phase": "Starting", "attempt": 1, "membersSince": 1}
    store.put_job({**job(replicas, args), "status": status})
    read = act.QuorumRead(attempt=1, at=CLOCK.now(), alone=True)
    store.set_feedback("u1", act.ApiFeedback(network_attempt=1, confirmed=read, begun=1))
    return store


@contextlib.asynccontextmanager
async def reconciling(store: Store, executor: Any) -> AsyncIterator[WorkQueue[Key]]:
    queue: WorkQueue[Key] = WorkQueue()
    reconciler = Reconciler(store, queue, executor, Metrics(), lambda: True, CLOCK)
    queue.add(KEY)
    task = asyncio.create_task(queue.run(2, reconciler.reconcile))
    yield queue
    task.cancel()
    await asyncio.wait([task])


async def test_a_status_that_is_refused_is_tried_ever_more_slowly() -> None:
    api, store = RefusingApi(), Store()
    store.put_job(job())
    executor = Executor(
        api,  # type: ignore[arg-type]
        store,
        None,  # type: ignore[arg-type]
        Metrics(),
        leads=lambda: True,
        now=lambda: datetime.now(UTC),
    )
    async with reconciling(store, executor):
        await asyncio.sleep(600)
    assert 10 < api.writes < 50


async def test_a_gang_of_large_pods_is_made_without_a_pause() -> None:
    """In many rounds, since its pods are rendered by the megabyte: not one a second."""
    store = starting(300, ["x" * 1000] * 120)
    async with reconciling(store, Taker(store)):
        await asyncio.sleep(2)
    assert len(store.pods_of("u1")) == 300


def ended(pod: observe.Pod, code: int, version: int) -> dict[str, Any]:
    container = {"name": "trainer", "state": {"terminated": {"exitCode": code}}}
    phase = "Failed" if code else "Succeeded"
    status = {"phase": phase, "containerStatuses": [container]}
    return stored.pod(pod.uid, pod.replica, pod.attempt, version=version, status=status)


async def test_a_loss_among_many_that_are_done_is_not_held_up_by_them() -> None:
    """Each success is a write of its own, so the job is busy for as many rounds."""
    store = starting(200)
    taker = Taker(store)
    async with reconciling(store, taker) as queue:
        await asyncio.sleep(2)
        gang = store.pods_of("u1")
        assert len(gang) == 200
        taker.seconds = 0.02
        for number, pod in enumerate(gang, 10_000):
            last = pod is gang[-1]
            store.put_pod(ended(pod, 1 if last else 0, number))
            queue.add(KEY)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
    found = store.snapshot(KEY)
    assert found
    assert (found.job.status["phase"], found.job.status["attempt"]) == ("Starting", 2)
    assert len(found.pods) == 200


POISONED = [
    {"succeededReplicas": ",".join(f"{n}-{n + 10_000}" for n in range(0, 10**7, 10_001))},
    {"succeededReplicas": "0-9999," * 100_000},
    {"succeededReplicas": f"0,{'9' * 5000}"},
    {"births": ",".join(f"{n}:1" for n in range(100_000))},
    {"serving": f"1:{'9' * 5000}"},
    {"attempt": 10**5000},
    {"restarts": {"total": -(10**5000), "snapshotStep": 10**5000}},
    {"progress": {"step": 10**5000, "snapshotStep": 10**400}},
    {"failures": [{"detectedAt": "2026-01-01T00:00:00Z", "exitCode": 10**5000}] * 10_000},
    {"conditions": [{"type": f"C{n}"} for n in range(10_000)], "replicas": {"desired": 10**5000}},
]


@pytest.mark.fault("U3")
@pytest.mark.parametrize("poison", POISONED, ids="+".join)
async def test_what_is_in_one_jobs_status_stops_neither_it_nor_another(
    poison: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = starting(2)
    spoilt = {"phase": "Starting", "attempt": 1, "membersSince": 1, **poison}
    store.put_job({**stored.job(5, "u2", "spoilt"), "spec": job(2)["spec"], "status": spoilt})
    tracemalloc.start()
    async with reconciling(store, Taker(store)) as queue:
        queue.add(("ns", "spoilt"))
        await asyncio.sleep(5)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 16 * 2**20
    assert [len(store.pods_of(uid)) for uid in ("u1", "u2")] == [2, 2]
    assert [record.message for record in caplog.records] == []
