"""Events: too many are cut, failures stay here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ddpjob_operator.core.actions import Event
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.shell.api import ApiError, Forbidden, Object, Resource
from ddpjob_operator.shell.telemetry import Recorder

STARTED = Event("Normal", "Started", "creating 3 pods")
FAILED = Event("Warning", "Failed", "exit code 1")


def job(uid: str = "u1") -> Job:
    return Job("ns", "job", uid, "7", 1, False, {}, {})


class Sink:
    def __init__(self) -> None:
        self.created: list[Object] = []
        self.fail: list[ApiError] = []

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        if self.fail:
            raise self.fail.pop()
        assert namespace == "ns"
        self.created.append(body)
        return body


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def recording() -> AsyncIterator[tuple[Recorder, Sink, Time]]:
    sink, time = Sink(), Time()
    recorder = Recorder(sink, "op-a", clock=time)
    task = asyncio.create_task(recorder.run())
    yield recorder, sink, time
    task.cancel()


async def test_an_event_names_the_job_and_a_failure_to_send_is_no_failure() -> None:
    async with recording() as (recorder, sink, _):
        sink.fail = [Forbidden(403, "Forbidden", "no")]
        recorder.send(job(), [FAILED, STARTED])
        await recorder.flush()
    (body,) = sink.created
    assert body["involvedObject"] == {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "namespace": "ns",
        "name": "job",
        "uid": "u1",
        "resourceVersion": "7",
    }
    assert (body["type"], body["reason"], body["count"]) == ("Normal", "Started", 1)


async def test_one_job_cannot_flood_and_does_not_silence_others() -> None:
    async with recording() as (recorder, sink, time):
        flood = [Event("Normal", "Flood", str(number)) for number in range(500)]
        recorder.send(job(), flood)
        recorder.send(job("u2"), [STARTED])
        await recorder.flush()
        assert len(sink.created) == 41
        time.now += 601
        recorder.send(job(), flood)
        await recorder.flush()
    assert len(sink.created) == 81
