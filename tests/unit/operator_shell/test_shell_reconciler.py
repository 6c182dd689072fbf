"""The reconciler: what it does about a job whose writes are refused for good."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from ddpjob_operator.shell import errors
from ddpjob_operator.shell.clock import Clock
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.metrics import Metrics
from ddpjob_operator.shell.reconciler import Reconciler
from ddpjob_operator.shell.store import Key, Store
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


def job() -> dict[str, Any]:
    meta = {"namespace": "ns", "name": "job", "uid": "u1", "resourceVersion": "5"}
    container = {"name": "trainer", "image": "example/train:1"}
    spec = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
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
