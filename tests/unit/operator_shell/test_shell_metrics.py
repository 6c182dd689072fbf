"""What /metrics tells of jobs: of those that this operator leads, by namespace, from 0 on."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from ddpjob_contract.exits import SEVERITY
from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.telemetry import Metrics


def job(namespace: str, **status: object) -> observe.Job:
    return observe.Job(namespace, "one", "u1", "1", 1, False, {}, status)


class Told:
    """Metrics over a list of jobs that a test changes."""

    def __init__(self) -> None:
        self.jobs: list[observe.Job] = []
        self.now = 0.0
        self.metrics = Metrics(lambda: self.now)
        self.metrics.expose_jobs(lambda: self.jobs)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def told() -> Told:
    return Told()


def test_jobs_are_counted_by_namespace_and_phase(told: Told) -> None:
    told.jobs = [
        job("a"),
        job("a", phase="Running"),
        job("a", phase="Nonsense"),
        job("b", phase="Failed"),
    ]
    assert told("ddpjob_jobs", namespace="a", phase="Pending") == 2
    assert told("ddpjob_jobs", namespace="a", phase="Running") == 1
    assert told("ddpjob_jobs", namespace="a", phase="Failed") == 0
    assert told("ddpjob_jobs", namespace="b", phase="Failed") == 1
    assert told("ddpjob_jobs", namespace="a", phase="Nonsense") is None


def test_a_namespace_without_jobs_for_a_day_has_no_series_any_more(told: Told) -> None:
    """Namespaces that come and go by the hour would fill the operator and Prometheus else."""
    told.jobs = [job("a", phase="Running"), job("b", phase="Running")]
    told.metrics.count_refusal("a", 403)
    told.metrics.registry.get_sample_value("ddpjob_jobs")
    told.jobs, told.now = [job("b", phase="Running")], 86_000.0
    assert told("ddpjob_refused_creations_total", namespace="a", code="403") == 1
    assert told("ddpjob_jobs", namespace="a", phase="Running") == 0
    told.now = 86_500.0
    assert told("ddpjob_jobs", namespace="a", phase="Running") is None
    text = generate_latest(told.metrics.registry).decode()
    assert 'namespace="a"' not in text
    assert 'ddpjob_restarts_total{class="OOM",namespace="b"} 0.0' in text
    told.jobs = [job("a", phase="Running")]
    assert told("ddpjob_jobs", namespace="a", phase="Running") == 1
    assert told("ddpjob_refused_creations_total", namespace="a", code="403") == 0


def test_what_is_not_as_it_should_be_is_counted_by_reason_until_its_end(told: Told) -> None:
    told.jobs = [
        job("a", phase="Starting", reason="Unschedulable"),
        job("a", phase="Running", reason="NodeNotReady"),
        job("a", phase="Running", reason=["not", "a", "word"]),
        job("a", phase="Failed", reason="MaxRestartsExceeded"),
    ]
    assert told("ddpjob_stalled", namespace="a", reason="Unschedulable") == 1
    assert told("ddpjob_stalled", namespace="a", reason="NodeNotReady") == 1
    assert told("ddpjob_stalled", namespace="a", reason="MaxRestartsExceeded") is None


def test_counters_of_a_namespace_begin_at_zero(told: Told) -> None:
    told.jobs = [job("a")]
    told.metrics.registry.get_sample_value("ddpjob_jobs", {})  # a scrape
    for kind in (*SEVERITY, "Unknown"):
        assert told("ddpjob_restarts_total", namespace="a", **{"class": kind}) == 0
        assert told("ddpjob_rounds_total", namespace="a", **{"class": kind}) == 0
    for result in ("Succeeded", "Failed"):
        assert told("ddpjob_finished_total", namespace="a", result=result) == 0
    told.metrics.record("a", [Measurement("finished_total", 1, "Failed")])
    told.metrics.count_refusal("a", 403)
    assert told("ddpjob_finished_total", namespace="a", result="Failed") == 1
    assert told("ddpjob_refused_creations_total", namespace="a", code="403") == 1
