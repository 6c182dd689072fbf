"""An operator in the model: the real store, informer, resync, executor and reconciler.

Only what is outside the process is replaced: the API server (model.cluster), the clock and
the timers of the work queue. So what a Plan does in the model is what it does in a cluster.
An operator's views lag: it knows what was delivered to it, in order, and not more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.actions import Plan
from ddpjob_operator.core.objects import observe, status
from ddpjob_operator.core.plan import plan as real_plan
from ddpjob_operator.shell import app, reconciler
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.informer import NodeInformer, PodInformer, WorkloadInformer
from ddpjob_operator.shell.jobs import Resync
from ddpjob_operator.shell.nodes import NodeCache
from ddpjob_operator.shell.reconciler import OperatorClock, Reconciler
from ddpjob_operator.shell.store import Key, RewoundError, Store
from ddpjob_operator.shell.telemetry import Metrics
from model.cluster import START, selects
from model.wire import Crash, ModelApi, Wire

Planner = Callable[..., Plan]

RESYNC = timedelta(seconds=30)  # jobs are listed anew
RELIST = timedelta(seconds=600)  # and pods
_FIRST_DELAY, _MAX_DELAY = 0.1, 30.0  # of the work queue


class ModelQueue:
    """shell.workqueue.WorkQueue on the cluster's clock; no jitter."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self.due: dict[Key, datetime] = {}
        self._failures: dict[Key, int] = {}

    def add(self, key: Key) -> None:
        self.due[key] = self._now()

    def add_idle(self, key: Key) -> None:
        self.due[key] = min(self._now(), self.due.get(key, self._now()))

    def add_after(self, key: Key, delay: float) -> None:
        at = self._now() + timedelta(seconds=max(delay, 0.0))
        self.due[key] = min(at, self.due.get(key, at))

    def add_failed(self, key: Key, at_least: float | None = None) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(failures, 20)), at_least or 0.0)
        self.add_after(key, delay)
        return delay

    def rest(self, key: Key, seconds: float) -> None:
        """Looks take no time here."""

    def forgive(self, key: Key) -> None:
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        self._failures.pop(key, None)
        self.due.pop(key, None)

    def take(self) -> Key | None:
        """The key that has waited longest, if it is its turn."""
        ready = [(at, key) for key, at in self.due.items() if at <= self._now()]
        if not ready:
            return None
        key = min(ready)[1]
        del self.due[key]
        return key


class Operator:
    """One process. ``deliver`` brings news, ``work`` lets it look at one job once."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        loop: asyncio.AbstractEventLoop,
        planner: Planner = real_plan,
        behind: int = 0,
        pods_behind: int | None = None,
    ) -> None:
        self.wire, self.name, self.planner, self._loop = wire, name, planner, loop
        self.leading, self.dead, self.working = True, False, False
        self.skew = timedelta()  # of its clock
        self.task: asyncio.Task[None] | None = None
        self.held: list[asyncio.Future[None]] = []  # its calls that are held up
        self.events: list[tuple[Key, Any]] = []
        self.store = Store(self._told)
        self.store.nodes = NodeCache(self._monotonic)
        self._clock = OperatorClock(
            wall=self.now, monotonic=self._monotonic, stepped=self.store.forget_times
        )
        self.queue = ModelQueue(self.clock)
        self.api = ModelApi(self)
        metrics = Metrics()
        recorder: Any = SimpleNamespace(
            send=lambda job, events: self.events.extend((job.key, e) for e in events)
        )
        api: Any = self.api
        queue: Any = self.queue
        leads = lambda: self.leading  # noqa: E731
        executor = Executor(api, self.store, recorder, metrics, leads=leads, now=self._clock.now)
        self.gang_api = ""
        self._reconciler = Reconciler(
            self.store, queue, executor, metrics, leads, self._clock, gang_api=lambda: self.gang_api
        )
        self._informers = {
            "pods": PodInformer(api, self.store, None, self.queue.add),
            "nodes": NodeInformer(api, self.store, None, self.queue.add),
            "workloads": WorkloadInformer(api, self.store, None, self.queue.add),
        }
        self._resync = Resync(api, self.store, None, self.queue.add, self.queue.add_idle)
        self._app: Any = SimpleNamespace(_store=self.store, _queue=self.queue)
        self.cursor: dict[str, int] = {}
        pods = behind if pods_behind is None else pods_behind
        self._start({crd.PLURAL: behind, "pods": pods, "nodes": 0, "workloads": behind})

    def clock(self) -> datetime:
        """Time as it passes, for timers."""
        return self.wire.cluster.now

    def now(self) -> datetime:
        """What the operator's machine takes for the time."""
        return self.wire.cluster.now + self.skew

    def _told(self) -> datetime:
        return self._clock.now()

    def _monotonic(self) -> float:
        return (self.wire.cluster.now - START).total_seconds()

    def jump(self, hours: float) -> None:
        """Its machine's clock is set."""
        self.skew += timedelta(hours=hours)

    def _start(self, behind: dict[str, int]) -> None:
        """The first lists, maybe of an old state; the watches go on from there."""
        self.api.behind = behind
        self.discover()
        self.relist()
        self.resync()
        self.api.behind = {}
        seen = len(self.wire.cluster.history)
        self.cursor = {plural: max(0, seen - late) for plural, late in behind.items()}
        self.era = self.wire.cluster.era

    def relist(self) -> None:
        """The informers' own full lists; their watches go on from there."""
        for plural, informer in self._informers.items():
            self._list(informer._list())
            self.cursor[plural] = len(self.wire.cluster.history)
        self.relisted_at = self.clock()
        self.blind = False

    def resync(self) -> None:
        """The list of jobs every 30 s; all keys are looked at."""
        self._list(self._resync._list_all())
        self._clock.received()
        self.resynced_at = self.clock()

    def discover(self) -> None:
        """Ask which API serves PodGroups."""
        found = "v1alpha2" if self.wire.cluster.gang_api else ""
        if found != self.gang_api:
            self.gang_api = found
            for job in list(self.store.jobs()):
                self.queue.add(job.key)
        self.discovered_at = self.clock()

    def _list(self, listing: Coroutine[Any, Any, Any]) -> None:
        if self.dead:
            listing.close()
            return
        try:
            self._loop.run_until_complete(listing)
        except RewoundError:
            self.dead = True  # the process ends, and starts anew

    @property
    def at_rest(self) -> bool:
        """It has heard of all there is, and is not about to look at anything."""
        heard = min(self.cursor.values()) == len(self.wire.cluster.history)
        busy = any(at <= self.clock() for at in self.queue.due.values())
        return heard and not (self.blind or self.task or busy)

    def deliver(self, plural: str) -> None:
        """Pass on the next events of one watch."""
        self._mind_restore()
        history, at = self.wire.cluster.history, self.cursor[plural]
        self.cursor[plural] = len(history)
        for write in history[at:]:
            if write.plural == plural:
                self._apply(write.kind, plural, dict(write.obj))

    def lose(self, plural: str) -> None:
        """A gap in the watch: what was not delivered never will be."""
        self._mind_restore()
        now = len(self.wire.cluster.history)
        self.blind |= now > self.cursor[plural]
        self.cursor[plural] = now

    def hear_launchers(self) -> None:
        """Poll /state of each hub that runs: its launchers wait for a lost one's replacement."""
        for job in list(self.store.jobs()):
            known = self.store.feedback(job.uid)
            said = observe.Rounds(
                status.from_dict(job.status).hub, 0, (), can_wait_for_replacement=True
            )
            if job.status.get("phase") == "Running" and known.rounds != said:
                self.store.set_feedback(job.uid, replace(known, rounds=said))
                self.queue.add(job.key)

    def _apply(self, kind: str, plural: str, obj: dict[str, Any]) -> None:
        if plural == crd.PLURAL:
            app.App._on_job_event(self._app, kind, observe.job(obj))
        else:
            # A pod that loses the label leaves the selection: its watch says DELETED.
            informer = self._informers[plural]
            chosen = selects(informer.selector, obj)
            for key in informer._apply(kind if chosen else "DELETED", obj):
                self.queue.add(key)

    def _mind_restore(self) -> None:
        """Versions went back: the watches break, and everything is listed anew."""
        if self.era != self.wire.cluster.era:
            self.era = self.wire.cluster.era
            self.relist()
            if not self.dead:
                self.resync()
            self.cursor = dict.fromkeys(self.cursor, len(self.wire.cluster.history))

    def work(self) -> bool:
        """Look at one job whose turn it is. False if there is none, or a call is held up."""
        if self.task is None:
            key = self.queue.take()
            if key is None:
                return False
            self.task = self._loop.create_task(self._reconciler.reconcile(key))
        elif self.held:
            return False
        self._run()
        return True

    def _run(self) -> None:
        """Until the look is over, the process dead, or a call held up."""
        task = self.task
        assert task is not None
        held = asyncio.Event()

        def hold(call: asyncio.Future[None]) -> None:
            self.held.append(call)
            held.set()

        self.wire.on_hold = hold
        self.working = True
        kept, reconciler.plan = reconciler.plan, self.planner
        try:
            self._loop.run_until_complete(_until_done_or_held(task, held))
        finally:
            reconciler.plan = kept
            self.working = False
        if task.done():
            self.task = None
            # Asked for, or asyncio complains. Who finds that etcd was restored starts anew.
            crashed = isinstance(task.exception(), (Crash, RewoundError))
            self.dead = self.dead or crashed

    def release(self) -> None:
        """The calls that were held up go on their way; others of the same look are refused."""
        if self.held:
            for call in self.held:
                call.set_result(None)
            self.held.clear()
            self._run()


async def _until_done_or_held(task: asyncio.Task[None], held: asyncio.Event) -> None:
    waiter = asyncio.ensure_future(held.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
