"""The reconciler: how often it looks at a job whose writes are refused, or that is large."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_contract import crd
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.reconciler import OperatorClock, Reconciler, WorkQueue
from ddpjob_operator.shell.store import Key, Store
from ddpjob_operator.shell.telemetry import Metrics
from model.cluster import Cluster, Object
from model.wire import ModelApi, Wire

pytestmark = [pytest.mark.looptime]

KEY = ("ns", "job")
CLOCK = OperatorClock()


class SlowApi(ModelApi):
    """``seconds``: that each call takes."""

    seconds = 0.0

    async def _send(self, *what: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return await super()._send(*what)


class Stage:
    """One reconciler of jobs in the model's cluster; no watch, so a test tells of what is new."""

    name, dead, working = "operator", False, True

    def __init__(self, replicas: int, args: Sequence[str] = ()) -> None:
        container = {"name": "trainer", "image": "example/train:1", "args": list(args)}
        self._spec = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
        self.cluster = Cluster(datetime.now(UTC))
        self.wire, self.store = Wire(self.cluster), Store()
        self.api, self.queue = SlowApi(self), WorkQueue[Key]()
        self.job = self.add("job")

    def add(self, name: str, **status: Any) -> Object:
        meta = {"namespace": "ns", "name": name}
        job = {"metadata": meta, "spec": self._spec, "status": status}
        made = self.cluster.create(crd.PLURAL, job)
        self.store.put_job(made)
        self.queue.add(("ns", name))
        return made

    def pods(self, job: Object) -> tuple[observe.Pod, ...]:
        return self.store.pods_of(job["metadata"]["uid"])

    def end(self, name: str, code: int) -> None:
        self.cluster.finish(self.cluster.get("pods", name), code)
        self.store.put_pod(self.cluster.get("pods", name))
        self.queue.add(KEY)

    @contextlib.asynccontextmanager
    async def working_on_it(self) -> AsyncIterator[None]:
        api: Any = self.api
        recorder: Any = SimpleNamespace(send=lambda *_: None)
        now, leads, metrics = CLOCK.now, lambda: True, Metrics()
        executor = Executor(api, self.store, recorder, metrics, leads=leads, now=now)
        reconciler = Reconciler(self.store, self.queue, executor, metrics, leads, CLOCK)
        task = asyncio.create_task(self.queue.run(2, reconciler.reconcile))
        yield
        task.cancel()
        await asyncio.wait([task])


async def test_a_status_that_is_refused_is_tried_ever_more_slowly():
    stage = Stage(2)
    stage.wire.gate = lambda call: "422" if call.verb == "replace" else ""
    async with stage.working_on_it():
        await asyncio.sleep(600)
    assert 10 < len([call for call in stage.wire.calls if call.verb == "replace"]) < 50


async def test_a_gang_of_large_pods_is_made_without_a_pause():
    """In many rounds, since its pods are rendered by the megabyte: not one a second."""
    stage = Stage(300, ["x" * 1000] * 120)
    async with stage.working_on_it():
        await asyncio.sleep(2)
    assert len(stage.pods(stage.job)) == 300


async def test_a_loss_among_many_that_are_done_is_not_held_up_by_them():
    """Each success is a write of its own, so the job is busy for as many rounds."""
    stage = Stage(200)
    async with stage.working_on_it():
        await asyncio.sleep(2)
        gang = stage.pods(stage.job)
        assert len(gang) == 200
        stage.api.seconds = 0.02
        for pod in gang:
            stage.end(pod.name, 1 if pod is gang[-1] else 0)
            await asyncio.sleep(0.01)
        await asyncio.sleep(5)
    found = stage.cluster.status("job")
    assert (found["phase"], found["attempt"], len(stage.pods(stage.job))) == ("Starting", 2, 200)


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
async def test_what_is_in_one_jobs_status_stops_neither_it_nor_another(poison, caplog):
    stage = Stage(2)
    spoilt = stage.add("spoilt", phase="Starting", **{"attempt": 1, "membersSince": 1, **poison})
    tracemalloc.start()
    async with stage.working_on_it():
        await asyncio.sleep(5)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 16 * 2**20
    assert [len(stage.pods(job)) for job in (stage.job, spoilt)] == [2, 2]
    assert [record.message for record in caplog.records] == []
