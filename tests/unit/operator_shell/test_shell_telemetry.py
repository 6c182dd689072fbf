"""What is published of jobs: metrics, by namespace and from 0 on; Events, not too many."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import generate_latest

from ddpjob_contract.exits import SEVERITY
from ddpjob_operator.core.actions import Event, Measurement
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import ApiError, Forbidden, Object, Resource
from ddpjob_operator.shell.telemetry import Metrics, Recorder

STARTED = Event("Normal", "Started", "creating 3 pods")
FAILED = Event("Warning", "Failed", "exit code 1")


def job(namespace: str, uid: str = "u1", **status: object) -> observe.Job:
    return observe.Job(namespace, "job", uid, "7", 1, False, {}, status)


class Published:
    """Metrics over a list of jobs that a test changes."""

    def __init__(self) -> None:
        self.jobs: list[observe.Job] = []
        self.now = 0.0
        self.metrics = Metrics(lambda: self.now)
        self.metrics.expose_jobs(lambda: self.jobs)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def shown() -> Published:
    return Published()


def test_jobs_are_counted_by_namespace_and_phase(shown):
    shown.jobs = [
        job("a"),
        job("a", phase="Running"),
        job("a", phase="Nonsense"),
        job("b", phase="Failed"),
    ]
    assert shown("ddpjob_jobs", namespace="a", phase="Pending") == 2
    assert shown("ddpjob_jobs", namespace="a", phase="Running") == 1
    assert shown("ddpjob_jobs", namespace="a", phase="Failed") == 0
    assert shown("ddpjob_jobs", namespace="b", phase="Failed") == 1
    assert shown("ddpjob_jobs", namespace="a", phase="Nonsense") is None


def test_a_namespace_without_jobs_for_a_day_has_no_series_any_more(shown):
    """Namespaces that come and go by the hour would fill the operator and Prometheus else."""
    shown.jobs = [job("a", phase="Running"), job("b", phase="Running")]
    shown.metrics.count_refusal("a", 403)
    shown.metrics.registry.get_sample_value("ddpjob_jobs")
    shown.jobs, shown.now = [job("b", phase="Running")], 86_000.0
    assert shown("ddpjob_refused_creations_total", namespace="a", code="403") == 1
    assert shown("ddpjob_jobs", namespace="a", phase="Running") == 0
    shown.now = 86_500.0
    assert shown("ddpjob_jobs", namespace="a", phase="Running") is None
    text = generate_latest(shown.metrics.registry).decode()
    assert 'namespace="a"' not in text
    assert 'ddpjob_restarts_total{class="OOM",namespace="b"} 0.0' in text
    shown.jobs = [job("a", phase="Running")]
    assert shown("ddpjob_jobs", namespace="a", phase="Running") == 1
    assert shown("ddpjob_refused_creations_total", namespace="a", code="403") == 0


def test_what_is_not_as_it_should_be_is_counted_by_reason_until_its_end(shown):
    shown.jobs = [
        job("a", phase="Starting", reason="Unschedulable"),
        job("a", phase="Running", reason="NodeNotReady"),
        job("a", phase="Running", reason=["not", "a", "word"]),
        job("a", phase="Failed", reason="MaxRestartsExceeded"),
    ]
    assert shown("ddpjob_stalled", namespace="a", reason="Unschedulable") == 1
    assert shown("ddpjob_stalled", namespace="a", reason="NodeNotReady") == 1
    assert shown("ddpjob_stalled", namespace="a", reason="MaxRestartsExceeded") is None


def test_counters_of_a_namespace_begin_at_zero(shown):
    shown.jobs = [job("a")]
    shown.metrics.registry.get_sample_value("ddpjob_jobs", {})  # a scrape
    for kind in (*SEVERITY, "Unknown"):
        assert shown("ddpjob_restarts_total", namespace="a", **{"class": kind}) == 0
        assert shown("ddpjob_rounds_total", namespace="a", **{"class": kind}) == 0
    for result in ("Succeeded", "Failed"):
        assert shown("ddpjob_finished_total", namespace="a", result=result) == 0
    shown.metrics.record("a", [Measurement("finished_total", 1, "Failed")])
    shown.metrics.count_refusal("a", 403)
    assert shown("ddpjob_finished_total", namespace="a", result="Failed") == 1
    assert shown("ddpjob_refused_creations_total", namespace="a", code="403") == 1


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


async def test_an_event_names_the_job_and_a_failure_to_send_is_no_failure():
    async with recording() as (recorder, sink, _):
        sink.fail = [Forbidden(403, "Forbidden", "no")]
        recorder.send(job("ns"), [FAILED, STARTED])
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


async def test_one_job_cannot_flood_and_does_not_silence_others():
    async with recording() as (recorder, sink, time):
        flood = [Event("Normal", "Flood", str(number)) for number in range(500)]
        recorder.send(job("ns"), flood)
        recorder.send(job("ns", "u2"), [STARTED])
        await recorder.flush()
        assert len(sink.created) == 41
        time.now += 601
        recorder.send(job("ns"), flood)
        await recorder.flush()
    assert len(sink.created) == 81
