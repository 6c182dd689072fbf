"""Put the parts together, run them, and take them down in the right order.

__main__.py runs one App. These fill the store and name keys: kopf's events of jobs and the resync,
the informers of pods, nodes and Workloads, and progress.py with news of a job. The time that a plan
asks for, a lease that is won and an API of PodGroups that comes or goes name keys, too. Workers
take them, but only while this process holds the lease. On SIGTERM: no new work, running work ends,
the lease is released, exit 0. On a lost lease, or when etcd was restored from a backup: exit 1 at
once, and the kubelet starts the container again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from functools import partial
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator import __version__
from ddpjob_operator.core.objects import observe
from ddpjob_operator.settings import Credentials, Settings
from ddpjob_operator.shell.api import Api
from ddpjob_operator.shell.elector import Elector
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.informer import Informer, NodeInformer, PodInformer, WorkloadInformer
from ddpjob_operator.shell.jobs import JobWatcher, Resync, wait_for_crd
from ddpjob_operator.shell.nodes import NodeCache
from ddpjob_operator.shell.progress import ProgressReader
from ddpjob_operator.shell.reconciler import OperatorClock, Reconciler, WorkQueue
from ddpjob_operator.shell.scheduling import GangApi
from ddpjob_operator.shell.store import Key, RewoundError, Store
from ddpjob_operator.shell.telemetry import Metrics, Probes, Recorder

log = logging.getLogger(__name__)

# Seconds at the end. With _LAST_TASKS after the release they stay below the pod's grace of 10.
_LAST_WORK = 4.0  # for work under way
_LAST_TASKS = 1.0  # for cancelled tasks
_RELEASED = 7.0  # after the signal: the lease is released by then, or left to expire
_JOBS = crd.PLURAL
_AWAY = 30.0  # a list of jobs late by so many seconds means that the API server is away
_RELIST_FACTOR = 20  # pods are listed again once for so many resyncs of jobs


class App:
    """One operator process."""

    def __init__(self, settings: Settings, credentials: Credentials) -> None:
        self._settings = settings
        self._metrics = Metrics()
        nodes = NodeCache(signals=settings.node_signals)
        self._store = Store(lambda: self._clock.now(), nodes)  # noqa: PLW0108 - made below
        self._clock = OperatorClock(
            settings.resync_seconds + _AWAY,
            stepped=self._store.forget_times,
            namespaces=settings.namespaces,
        )
        self._queue: WorkQueue[Key] = WorkQueue(
            self._metrics.queue_latency.observe,
            group=lambda key: key[0],  # namespaces take turns
        )
        watches = 1 + 2 * max(1, len(settings.namespaces))  # of pods, Workloads and nodes
        self._api = Api(credentials, self._metrics.count_call, watches)
        self._recorder = Recorder(self._api, settings.identity)
        # Separate connections: a slow list or a full pool must not cost the lease.
        self._lease_api = Api(credentials, self._metrics.count_call)
        self._elector = Elector(
            self._lease_api,
            namespace=settings.lease_namespace or credentials.namespace,
            name=settings.lease_name,
            identity=settings.identity,
            seconds=settings.lease_seconds,
            on_change=self._on_leadership,
        )
        store, queue, metrics, clock = self._store, self._queue, self._metrics, self._clock
        leads, add = self._elector.leads, queue.add
        executor = Executor(self._api, store, self._recorder, metrics, leads=leads, now=clock.now)
        self._gang_api = GangApi(self._api, self._look_at_all)
        self._reconciler = Reconciler(
            store,
            queue,
            executor,
            metrics,
            leads,
            clock,
            settings.metrics_from,
            self._known,
            lambda: self._gang_api.version,
            self._elector.where,
            lambda: self._progress.jobs,
        )
        self._watcher = JobWatcher(credentials, settings.namespaces, self._on_job_event)
        relist = settings.resync_seconds * _RELIST_FACTOR
        # A list and a watch per namespace: one without rights holds up no other's jobs.
        self._parts: dict[tuple[str, str | None], Resync | Informer] = {
            ("nodes", None): NodeInformer(self._api, store, None, add, relist)
        }
        for namespace in settings.namespaces or (None,):
            common, seen = (self._api, store, namespace, add), partial(clock.received, namespace)
            every = settings.resync_seconds
            self._parts[_JOBS, namespace] = Resync(*common, queue.add_idle, every, seen)
            self._parts["pods", namespace] = PodInformer(*common, relist)
            if settings.kueue:
                self._parts["workloads", namespace] = WorkloadInformer(*common, relist)
        self._progress = ProgressReader(store, add, leads, settings.progress_seconds)
        host, port = settings.probe_host, settings.probe_port
        self._probes = Probes(host, port, metrics.registry, self._idle_times, self._unready)
        self._expose()

    async def run(self) -> int:
        """Run until a signal or a lost lease; return the process's exit status."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with self._api, self._lease_api:
            await self._probes.start()
            where = ", ".join(self._settings.namespaces) or "all namespaces"
            what = "ddpjob-operator %s serves %s, probes on port %d"
            log.info(what, __version__, where, self._probes.port)
            try:
                return await self._run_parts(stop)
            finally:
                await self._probes.stop()

    async def _run_parts(self, stop: asyncio.Event) -> int:
        parts = {
            "kopf": self._watcher.run(partial(wait_for_crd, self._api)),
            "recorder": self._recorder.run(),
            "progress": self._progress.run(),
            "work": self._work(),
            "gang API": self._gang_api.run(),
            **{f"{what} {where or ''}": part.run() for (what, where), part in self._parts.items()},
        }
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        lease = asyncio.create_task(self._elector.run(), name="lease")
        asked = asyncio.create_task(stop.wait(), name="signal")
        try:
            done, _ = await asyncio.wait(
                [*tasks, lease, asked], return_when=asyncio.FIRST_COMPLETED
            )
            if asked in done:
                log.info("asked to stop")
                # The release gets the time that the work leaves: a busy API server takes it.
                loop = asyncio.get_running_loop()
                until = loop.time() + _RELEASED
                await self._finish_work()
                await _cancel([lease, *tasks])
                await self._elector.release(until - loop.time())
                return 0
            for task in done:
                rewound = _rewound(task.exception())
                if rewound:
                    log.error("%s; starting again", rewound)
                # A lost lease is no bug, and the elector has logged it.
                elif task is not lease or task.exception():
                    log.error("%s ended: a bug", task.get_name(), exc_info=task.exception())
            return 1
        finally:
            await _cancel([asked, lease, *tasks])

    async def _work(self) -> None:
        """Wait until the caches are full, then work while this process leads."""
        await self._fill()
        jobs, pods = len(self._store.keys_in(None)), self._store.pod_count()
        log.info("caches are full: %d jobs, %d pods", jobs, pods)
        gc.freeze()  # nearly all stay: later searches for cycles skip them
        await self._queue.run(self._settings.workers, self._reconciler.reconcile)

    async def _fill(self) -> None:
        """Return once every namespace has answered, and one has been listed."""
        for part in (*self._parts.values(), self._gang_api):
            await part.answered.wait()

        async def listed(where: str | None) -> None:
            await self._parts[_JOBS, where].synced.wait()
            await self._parts["pods", where].synced.wait()

        tries = [asyncio.create_task(listed(where)) for what, where in self._parts if what == _JOBS]
        try:
            await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(tries)

    def _known(self, namespace: str | None) -> bool:
        where = namespace if (_JOBS, namespace) in self._parts else None
        return all(self._parts[what, where].synced.is_set() for what in (_JOBS, "pods"))

    async def _finish_work(self) -> None:
        self._queue.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORK):
                await self._queue.drained()
                await self._recorder.flush()

    def _on_job_event(self, kind: str | None, job: observe.Job) -> None:
        if kind == "DELETED":
            if self._store.forget_job(job.key, job.uid):
                self._queue.add(job.key)
        elif self._store.put_job(job):
            self._queue.add(job.key)

    def _on_leadership(self, leading: bool) -> None:
        self._metrics.leader.set(1 if leading else 0)
        if leading:
            self._store.doubt_all()
            self._clock.interrupted()
            self._look_at_all()

    def _look_at_all(self) -> None:
        for key in self._store.keys_in(None):
            self._queue.add(key)

    def _idle_times(self) -> dict[str, float]:
        now = time.monotonic()
        whats = {what for what, _ in self._parts}
        return {what: now - min(part.alive_at for part in self._all(what)) for what in whats}

    def _all(self, wanted: str) -> list[Resync | Informer]:
        """Return the parts for one kind of object, of all namespaces."""
        return [part for (what, _), part in self._parts.items() if what == wanted]

    def _unready(self) -> list[str]:
        """List the parts without an answer yet; one namespace without rights is only logged."""
        return [
            f"list of {what}"
            for what in (_JOBS, "pods")
            if not all(part.answered.is_set() for part in self._all(what))
            or not any(part.synced.is_set() for part in self._all(what))
        ]

    def _expose(self) -> None:
        def age(what: str) -> float:
            received = min(part.received_at for part in self._all(what))
            watched = self._watcher.received_at if what == _JOBS else received
            return time.monotonic() - max(received, watched)

        self._metrics.expose_jobs(lambda: self._store.jobs() if self._elector.leads() else [])
        ages = {what: partial(age, what) for what in ("pods", _JOBS)}
        self._metrics.expose_watch_ages(ages)
        self._metrics.queue_depth.set_function(lambda: len(self._queue))


def _rewound(error: BaseException | None) -> BaseException | None:
    """Find RewoundError in the error of a part or, in a group, of a worker."""
    found = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, RewoundError) else None


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_LAST_TASKS)
