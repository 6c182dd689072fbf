"""Publish what the operator does: metrics, Events about jobs, and its own health.

Changes of jobs are counted, and their Events sent, once, after the status write that stored them
(executor.py). The present state is computed at each scrape, by the leader alone: sums over all
operators count nothing twice. No label ever holds the name of a job.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import prometheus_client as prom
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob_contract import LEDGER_STATES, crd
from ddpjob_contract.exits import SEVERITY
from ddpjob_operator import __version__
from ddpjob_operator.core.actions import Event, Measurement
from ddpjob_operator.core.objects import observe, status
from ddpjob_operator.shell.api import EVENTS, Api, ApiError

log = logging.getLogger(__name__)

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SLOW = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300, 600, 1800)
#: Seconds without a job after which a namespace's series end: long past every alert's window.
_FORGET_AFTER = 86_400.0
_STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_CLASSES = (*SEVERITY, "Unknown")
#: Counters by namespace: the text, the other label, and its values that begin at 0.
_COUNTERS = {
    "restarts_total": (
        "Restarts of gangs, by the class of the failure as it was known then",
        "class",
        _CLASSES,
    ),
    "rounds_total": (
        "Restarts of processes in place, by the class of the failure",
        "class",
        _CLASSES,
    ),
    "pod_seconds_total": (
        "Time of pods by where it went, as status.ledger has it",
        "state",
        LEDGER_STATES,
    ),
    "gpu_seconds_total": (
        "The same times the GPUs of each pod, where GPUs were asked for",
        "state",
        (),
    ),
    "finished_total": ("DDPJobs that have ended, by how", "result", crd.TERMINAL_PHASES),
    "refused_creations_total": (
        "Pods, Services and NetworkPolicies that the API server refused to create",
        "code",
        ("403",),
    ),
}
#: Histograms of stored changes of jobs, each with its text and its buckets.
_HISTOGRAMS = {
    "detection_seconds": ("From a failure to the stored decision", _SLOW),
    "recovery_seconds": ("From the last sign of progress to all running", _SLOW),
    "time_to_running_seconds": ("From start or resume to all replicas running", _SLOW),
    "lost_steps": ("Steps between the failure and the newest snapshot", _STEPS),
}


class Metrics(Collector):
    """One registry, the instruments in it, and a collector of jobs. ``clock`` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: Callable[[], Iterable[observe.Job]] = list
        # Namespaces of counters; their jobs may be gone by a scrape.
        self._counted = set[str]()
        self._seen: dict[str, float] = {}  # namespace -> when it had a job last
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]  # half as many series
        self.registry = prom.CollectorRegistry()
        prom.ProcessCollector(registry=self.registry)
        prom.GCCollector(registry=self.registry)
        self._counters = {
            name: prom.Counter(f"ddpjob_{name}", text, ["namespace", label], registry=self.registry)
            for name, (text, label, _) in _COUNTERS.items()
        }
        self._histograms = {
            name: self._histogram(f"ddpjob_{name}", text, buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        prom.Info("ddpjob_build", "The operator's version", registry=self.registry).info(
            {"version": __version__, "python": platform.python_version()}
        )
        self.reconcile = self._histogram(
            "ddpjob_reconcile_seconds", "Time to plan and act on one job once", _FAST
        )
        self.api_requests = prom.Counter(
            "ddpjob_api_requests",
            "Calls to the API server; code 0 is no answer",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.queue_depth = prom.Gauge(
            "ddpjob_workqueue_depth", "Jobs waiting for a worker", registry=self.registry
        )
        self.queue_latency = self._histogram(
            "ddpjob_workqueue_latency_seconds", "Time that jobs waited for a worker", _FAST
        )
        self.leader = prom.Gauge(
            "ddpjob_leader", "1 if this operator holds the lease", registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prom.Histogram:
        return prom.Histogram(name, text, buckets=buckets, registry=self.registry)

    def count_call(self, verb: str, resource: str, code: int) -> None:
        """Count one finished call to the API server."""
        self.api_requests.labels(verb, resource, str(code)).inc()

    def record(self, namespace: str, measurements: Iterable[Measurement]) -> None:
        """Record what a stored transition of a job in that namespace measured."""
        for one in measurements:
            if one.name in self._histograms:
                self._histograms[one.name].observe(one.value)
            else:
                self._count(one.name, namespace, one.label or "Unknown", one.value)

    def count_refusal(self, namespace: str, code: int) -> None:
        """Count a creation that the API server refused."""
        self._count("refused_creations_total", namespace, str(code))

    def _count(self, name: str, namespace: str, label: str, value: float = 1) -> None:
        self._counted.add(namespace)
        self._counters[name].labels(namespace, label).inc(value)

    def expose_jobs(self, jobs: Callable[[], Iterable[observe.Job]]) -> None:
        """Expose ddpjob_jobs{namespace,phase} and ddpjob_stalled{namespace,reason}.

        ``jobs()``: the jobs that this operator reports, none while another one leads.
        """
        self._jobs = jobs
        self.registry.register(self)

    def expose_watch_ages(self, ages: Mapping[str, Callable[[], float]]) -> None:
        """Expose ddpjob_watch_age_seconds{resource}: since the API server's last sign of life."""
        gauge = prom.Gauge(
            "ddpjob_watch_age_seconds",
            "Time since the API server last said anything about this resource",
            ["resource"],
            registry=self.registry,
        )
        for resource, age in ages.items():
            gauge.labels(resource).set_function(age)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the empty metrics of jobs."""
        yield GaugeMetricFamily("ddpjob_jobs", "DDPJobs by phase", labels=["namespace", "phase"])
        yield GaugeMetricFamily(
            "ddpjob_stalled",
            "DDPJobs that are not as they should be, by the reason that their status gives",
            labels=["namespace", "reason"],
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield them as the jobs are now."""
        phases: Counter[tuple[str, str]] = Counter()
        stalled: Counter[tuple[str, str]] = Counter()
        namespaces = set()
        for job in self._jobs():
            namespaces.add(job.namespace)
            known = job.status.get("phase")
            phase = known if isinstance(known, str) and known in status.PHASES else "Pending"
            phases[job.namespace, phase] += 1
            reason = job.status.get("reason")
            if reason and isinstance(reason, str) and phase not in crd.TERMINAL_PHASES:
                stalled[job.namespace, reason] += 1
        self._begin_at_zero(namespaces)
        jobs, reasons = self.describe()
        for namespace in sorted(self._seen):
            for phase in status.PHASES:  # zeros too: a series that goes away says nothing
                jobs.add_metric([namespace, phase], phases[namespace, phase])
        for labels, count in sorted(stalled.items()):
            reasons.add_metric(labels, count)
        yield jobs
        yield reasons

    def _begin_at_zero(self, namespaces: set[str]) -> None:
        """Begin new namespaces' counters at 0: Prometheus sees no increase from nothing to 1."""
        now = self._clock()
        # Counted namespaces may have lost their jobs before the first scrape.
        new = (namespaces | self._counted) - self._seen.keys()
        for namespace in sorted(new):
            for name, (_, _, labels) in _COUNTERS.items():
                for label in labels:
                    self._counters[name].labels(namespace, label)
        self._seen.update(dict.fromkeys(namespaces | new, now))
        for namespace in [n for n, at in self._seen.items() if now - at > _FORGET_AFTER]:
            del self._seen[namespace]
            self._counted.discard(namespace)
            for counter in self._counters.values():
                counter.remove_by_labels({"namespace": namespace})


_COMPONENT = "ddpjob-operator"
_MOST = 40  # events of one job ...
_PERIOD = 600.0  # ... in so many seconds
_QUEUE = 1000
_MESSAGE_MAX = 1024


class Recorder:
    """The sender of Events: ``send`` only puts them in line; ``run`` sends them.

    A job with too many events is cut short. Sending delays and fails nothing else.
    """

    def __init__(
        self, api: Api, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._instance, self._clock = api, instance, clock
        self._line: asyncio.Queue[tuple[observe.Job, Event]] = asyncio.Queue(_QUEUE)
        self._begun = clock()
        self._sent: Counter[str] = Counter()  # in this period, by job uid

    def send(self, job: observe.Job, events: Iterable[Event]) -> None:
        """Put the events in line; drop what exceeds the job's rate or a full line."""
        if self._clock() - self._begun > _PERIOD:
            self._begun = self._clock()
            self._sent.clear()
        for event in events:
            self._sent[job.uid] += 1
            if self._sent[job.uid] > _MOST:
                log.debug("%s/%s: too many events, dropped %s", *job.key, event.reason)
                continue
            try:
                self._line.put_nowait((job, event))
            except asyncio.QueueFull:
                log.warning("too many events wait to be sent, dropped %s", event.reason)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            job, event = await self._line.get()
            try:
                await self._api.create(EVENTS, job.namespace, _body(job, event, self._instance))
            except ApiError as error:
                log.info("%s/%s: event %s not sent: %s", *job.key, event.reason, error)
            except Exception:
                log.exception("%s/%s: event %s not sent: a bug", *job.key, event.reason)
            finally:
                self._line.task_done()

    async def flush(self) -> None:
        """Wait until every event in line has been tried, for an orderly end."""
        await self._line.join()


def _body(job: observe.Job, event: Event, instance: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{secrets.token_hex(8)}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": f"{crd.GROUP}/{crd.VERSION}",
            "kind": crd.KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": job.resource_version,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MESSAGE_MAX],
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "reportingInstance": instance[:128],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


STUCK_AFTER = 180.0  # seconds; twice the longest that a watch may stay silent, and some

_KEPT = 1.0  # seconds; 2000 namespaces take 0.4 s to format
_MAX_CONNECTIONS = 64
# So many connections are open at once. A client that asks without delay has its answer before so
# many newer ones come that it is the oldest.
_BACKLOG = 8


class Probes:
    """Serves /healthz, /readyz and /metrics on one port, for the kubelet and Prometheus.

    /healthz fails when a loop of ours is stuck, by ``idle``, but stays well while the API server is
    away: a restart cures only the former. The event loop that does the work answers it, so a
    blocked loop fails it by silence. ``unready`` names parts without an answer yet.

    Strangers may ask without end: the text of /metrics is made at most once a second, a connection
    has one answer, and there are only so many connections.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        idle: Callable[[], Mapping[str, float]],
        unready: Callable[[], list[str]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._port, self._registry = host, port, registry
        self._idle, self._unready, self._now = idle, unready, now
        self._text, self._text_until = b"", now()
        self._runner: web.ServerRunner | None = None
        self.port = port

    async def start(self) -> None:
        """Listen; raise OSError if the port is taken."""
        server = _Server(self._answer, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host or None, self._port, backlog=_BACKLOG).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port."""
        if self._runner:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        page = pages.get(request.path)
        response = page() if page else web.Response(text="no such page\n", status=404)
        response.force_close()
        return response

    def _healthz(self) -> web.Response:
        idle = self._idle().items()
        return _health(f"{n} has done nothing for {s:.0f} s" for n, s in idle if s > STUCK_AFTER)

    def _readyz(self) -> web.Response:
        return _health(f"not yet: {what}" for what in self._unready())

    def _metrics(self) -> web.Response:
        if self._now() >= self._text_until:
            self._text = generate_latest(self._registry)
            self._text_until = self._now() + _KEPT
        return web.Response(body=self._text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _health(faults: Iterable[str]) -> web.Response:
    text = "".join(f"{fault}\n" for fault in faults)
    return web.Response(text=text or "ok\n", status=503 if text else 200)


class _Server(web.Server):
    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Close the oldest of too many connections: an honest client has its answer by now."""
        super().connection_made(handler, transport)
        for oldest in self.connections[:-_MAX_CONNECTIONS]:
            if oldest.transport is not None:
                oldest.transport.abort()
