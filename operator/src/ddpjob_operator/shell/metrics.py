"""All metrics of the operator, for /metrics. No label ever holds the name of a job.

What happened to jobs is counted once, after the status write that stored it (see
executor.py); what is true now is computed when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob_operator.core.actions import Measurement

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SLOW = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300, 600, 1800)
_STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class Metrics:
    """One registry and the instruments in it."""

    def __init__(self) -> None:
        # Half as many series; nobody asks for the others.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.restarts = Counter(
            "ddpjob_restarts",
            "Restarts of gangs, by the class of the failure",
            ["class"],
            registry=self.registry,
        )
        self.rounds = Counter(
            "ddpjob_rounds",
            "Restarts of processes in place, by the class of the failure",
            ["class"],
            registry=self.registry,
        )
        self.detection = self._histogram(
            "ddpjob_detection_seconds", "From a failure to the stored decision", _SLOW
        )
        self.recovery = self._histogram(
            "ddpjob_recovery_seconds", "From a stored restart to all replicas running", _SLOW
        )
        self.time_to_running = self._histogram(
            "ddpjob_time_to_running_seconds", "From a new attempt to all replicas running", _SLOW
        )
        self.lost_steps = self._histogram(
            "ddpjob_lost_steps", "Steps between the failure and the newest snapshot", _STEPS
        )
        self.reconcile = self._histogram(
            "ddpjob_reconcile_seconds", "Time to plan and act on one job once", _FAST
        )
        self.api_requests = Counter(
            "ddpjob_api_requests",
            "Calls to the API server; code 0 is no answer",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "ddpjob_workqueue_depth", "Jobs waiting for a worker", registry=self.registry
        )
        self.queue_latency = self._histogram(
            "ddpjob_workqueue_latency_seconds", "Time that jobs waited for a worker", _FAST
        )
        self.leader = Gauge(
            "ddpjob_leader", "1 if this operator holds the lease", registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def count_call(self, verb: str, resource: str, code: int) -> None:
        """One finished call to the API server."""
        self.api_requests.labels(verb, resource, str(code)).inc()

    def record(self, measurements: Iterable[Measurement]) -> None:
        """What a stored transition measured."""
        histograms = {
            "detection_seconds": self.detection,
            "recovery_seconds": self.recovery,
            "time_to_running_seconds": self.time_to_running,
            "lost_steps": self.lost_steps,
        }
        counters = {"restarts_total": self.restarts, "rounds_total": self.rounds}
        for measurement in measurements:
            if measurement.name in counters:
                counter = counters[measurement.name]
                counter.labels(measurement.label or "unknown").inc(measurement.value)
            else:
                histograms[measurement.name].observe(measurement.value)

    def expose_jobs(self, count_phases: Callable[[], Mapping[str, int]]) -> None:
        """ddpjob_jobs{phase}, computed from the store on every scrape."""
        self.registry.register(_Computed("ddpjob_jobs", "DDPJobs by phase", "phase", count_phases))

    def expose_watch_ages(self, ages: Callable[[], Mapping[str, float]]) -> None:
        """ddpjob_watch_age_seconds{resource}: since the API server last said anything."""
        self.registry.register(
            _Computed(
                "ddpjob_watch_age_seconds",
                "Time since the API server last said anything about this resource",
                "resource",
                ages,
            )
        )


class _Computed(Collector):
    """A gauge with one label whose values are asked for on every scrape."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._text, self._label, self._values = name, text, label, values

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._text, labels=[self._label])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for label, value in self._values().items():
            family.add_metric([label], value)
        yield family
