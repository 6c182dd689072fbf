"""Handle one key at a time: snapshot, plan, actions, the next look.

Watches and timers add keys to the WorkQueue; its workers call the Reconciler, which plans by the
OperatorClock. Trouble with one job stays with it: it is logged with its key and uid and tried again
later.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, TypeVar

from ddpjob_operator import __version__
from ddpjob_operator.core.actions import Body
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.json_read import integer, mapping
from ddpjob_operator.core.plan import plan
from ddpjob_operator.shell.api import ApiError
from ddpjob_operator.shell.executor import Executor, JobGoneError, NotLeadingError
from ddpjob_operator.shell.store import JobState, Key, RewoundError, Store
from ddpjob_operator.shell.telemetry import Metrics

log = logging.getLogger(__name__)

_BUSY_ROUNDS = 25  # busy planning rounds in a row, then slower
_BUSY_PAUSE = 1.0
#: Of all jobs that run, as writes of their status: they delay what is decided of others.
_REPORTS_PER_SECOND = 10
#: A look at a large gang takes long, and its pods' events come in thousands. After one without
#: actions the job rests so many times its length: looking takes at most a tenth of the time.
_REST = 9.0
_LONGEST_REST = 0.5


class Reconciler:
    """The work that the queue's workers do.

    ``known(namespace)``: its jobs and pods have been listed; until then its jobs are left alone.
    ``gang_api()``: the version of the API that serves PodGroups, "" without one. ``lease``: the
    operator's, by which jobs name it; "": they do not. ``reporting()``: how many jobs report.
    """

    def __init__(
        self,
        store: Store,
        queue: WorkQueue[Key],
        executor: Executor,
        metrics: Metrics,
        leads: Callable[[], bool],
        clock: OperatorClock,
        metrics_from: tuple[Body, ...] = (),
        known: Callable[[str], bool] = lambda _: True,
        gang_api: Callable[[], str] = str,
        lease: str = "",
        reporting: Callable[[], int] = int,
    ) -> None:
        self._store, self._queue, self._executor = store, queue, executor
        self._metrics, self._leads, self._clock = metrics, leads, clock
        self._metrics_from, self._known = metrics_from, known
        self._gang_api, self._lease, self._reporting = gang_api, lease, reporting
        self._busy: dict[Key, int] = {}

    async def reconcile(self, key: Key) -> None:
        """Bring one job a step nearer to its spec; raise nothing but RewoundError."""
        started, uid = time.perf_counter(), ""
        try:
            now = self._clock.now()  # first: a clock that was set makes the store forget
            snapshot = self._store.snapshot(key)
            if snapshot is None:
                self._forget(key)
                return
            uid = snapshot.job.uid
            if self._leads() and self._known(key[0]):
                await self._step(key, snapshot, now)
            self._queue.forgive(key)
        except NotLeadingError:
            log.debug("%s/%s: not leading, left alone (uid %s)", *key, uid)
        except JobGoneError:
            log.info("%s/%s: gone (uid %s)", *key, uid)
            self._store.forget_job(key, uid)
            self._forget(key)
        except RewoundError:
            raise  # all that this process knows is out of date
        except ApiError as error:
            delay = self._queue.add_failed(key, error.retry_after)
            log.warning("%s/%s: %s; again in %.1f s (uid %s)", *key, error, delay, uid)
        except Exception:
            delay = self._queue.add_failed(key)
            log.exception("%s/%s: a bug; again in %.1f s (uid %s)", *key, delay, uid)
        finally:
            self._metrics.reconcile.observe(time.perf_counter() - started)

    async def _step(self, key: Key, snapshot: JobState, now: datetime) -> None:
        began = time.thread_time()
        job = snapshot.job
        seen = self._store.seen(job.uid, job.status.get("attempt"))
        since = self._clock.seen_since(job.namespace)
        feedback = replace(
            snapshot.feedback,
            seen=seen,
            seen_since=since,
            metrics_from=self._metrics_from,
            gang_api=self._gang_api(),
            lease=self._lease,
            version=__version__,
            report_after=timedelta(seconds=self._reporting() / _REPORTS_PER_SECOND),
            workloads=self._store.workloads.of(job),
        )
        todo = plan(job, snapshot.pods, feedback, now, snapshot.nodes)
        if todo.actions:
            known = len(seen) + _done(job)
            await self._executor.carry_out(job, todo.actions)
            more = self._store.seen(job.uid, job.status.get("attempt"))
            left = self._store.snapshot(key)
            grew = left is not None and len(more) + _done(left.job) > known
            self._requeue(key, job, grew=grew)
            return
        self._busy.pop(key, None)
        self._queue.rest(key, min(_LONGEST_REST, _REST * (time.thread_time() - began)))
        if todo.requeue_after is not None:
            self._queue.add_after(key, max(todo.requeue_after, 0.01))

    def _requeue(self, key: Key, job: observe.Job, *, grew: bool) -> None:
        """Look again at once: most of what an action changes is already in the store.

        ``grew``: a replica is new, or done: that may take a large gang hundreds of rounds, and a
        loss among them must not wait.
        """
        if grew:
            self._queue.add(key)
            return
        rounds = self._busy.get(key, 0) + 1
        self._busy[key] = rounds
        if rounds <= _BUSY_ROUNDS:
            self._queue.add(key)
            return
        if rounds % _BUSY_ROUNDS == 1:
            log.warning("%s/%s: busy for %d rounds (uid %s)", *key, rounds, job.uid)
        self._queue.add_after(key, _BUSY_PAUSE)

    def _forget(self, key: Key) -> None:
        self._busy.pop(key, None)
        self._queue.forget(key)


def _done(job: observe.Job) -> int:
    return integer(mapping(job.status.get("replicas")).get("succeeded"))


K = TypeVar("K", bound=Hashable)

_FIRST_DELAY = 0.1  # seconds, doubled by each failure in a row
_MAX_DELAY = 30.0


class WorkQueue(Generic[K]):
    """Keys that want work: each once, each with one worker at a time.

    The rules are those of client-go's work queue: a key that comes back while it is being worked on
    is worked on once more afterwards; a key that fails comes back after a growing delay. Beyond
    them a key may be given a rest: requests meanwhile are answered at its end.

    Keys of one ``group(key)`` share a line, and lines take turns: a hundred keys of one group that
    come back and back make no key of another wait for more than one of them. A worker goes to the
    group that has fewest, and the last free one only to a group that has none: though all work of
    one group hangs, a key of another finds a worker at once. Idle keys are behind all lines.

    ``observe_latency(seconds)`` is called with the time each key spent in line.
    """

    def __init__(
        self,
        observe_latency: Callable[[float], None] = lambda _: None,
        group: Callable[[K], Hashable] = lambda key: key,
    ) -> None:
        self._lines: OrderedDict[Hashable, deque[K]] = OrderedDict()  # next group first
        self._group = group
        self._waiting: dict[K, float] = {}  # in line, since when
        self._idle_keys: OrderedDict[K, None] = OrderedDict()
        self._working: set[K] = set()  # one for each worker that is not free
        self._workers = 0
        self._again: set[K] = set()  # came back while being worked on
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._rests: dict[K, float] = {}  # until when
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # set when a worker finished
        self._closed = False
        self._observe_latency = observe_latency

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Put the key in line, once."""
        if key in self._waiting:
            return
        if key in self._working:
            self._again.add(key)
            return
        rest = self._rests.get(key, 0.0) - _now()
        if rest > 0:
            self.add_after(key, rest)
            return
        self._idle_keys.pop(key, None)
        self._waiting[key] = _now()
        self._lines.setdefault(self._group(key), deque()).append(key)
        self._wake.set()

    def add_idle(self, key: K) -> None:
        """Put the key behind all that are in line, now or later: nothing is known to have changed.

        Ten thousand jobs are looked at with each list, and none of them may delay a lost pod.
        """
        if self._rests.get(key, 0.0) > _now():
            self.add(key)  # after its rest
        elif key not in self._waiting and key not in self._working:
            self._idle_keys[key] = None
            self._wake.set()

    def add_after(self, key: K, delay: float) -> None:
        """Put the key in line after ``delay`` seconds, or earlier if that was asked for."""
        if delay <= 0:
            self.add(key)
            return
        due = _now() + delay
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(due, self._ring, key)

    def add_failed(self, key: K, at_least: float | None = None) -> float:
        """Put the key in line after its back-off, or ``at_least``; return the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(failures, 20))
        delay = max(delay * random.uniform(0.8, 1.2), at_least or 0.0)
        self.add_after(key, delay)
        return delay

    def rest(self, key: K, seconds: float) -> None:
        """Hand the key to no worker for so long from now."""
        self._rests[key] = _now() + seconds

    def forgive(self, key: K) -> None:
        """Reset the back-off of a key that was worked on well."""
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Drop the timer and the back-off of a key whose object is gone."""
        self._failures.pop(key, None)
        self._end_waits(key)

    def close(self) -> None:
        """Hand out no more keys; running work goes on."""
        self._closed = True
        self._wake.clear()

    async def drained(self) -> None:
        """Wait, after close, until no worker is busy."""
        while self._working:
            self._idle.clear()
            await self._idle.wait()

    async def run(self, workers: int, work: Callable[[K], Awaitable[None]]) -> None:
        """Work until cancelled; an error of ``work`` ends the run, as an ExceptionGroup."""
        self._workers = workers
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self._worker(work), name=f"worker-{number}")

    async def _worker(self, work: Callable[[K], Awaitable[None]]) -> None:
        while True:
            key = await self._take()
            try:
                await work(key)
            finally:
                self._working.discard(key)
                self._idle.set()
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)
            await asyncio.sleep(0)  # work that waited for nothing lets other tasks run

    async def _take(self) -> K:
        # A worker that ends its work looks here next, so only new keys wake a waiting one.
        while self._closed or (key := self._next_key()) is None:
            self._wake.clear()
            await self._wake.wait()
        self._working.add(key)
        # The timer's reason is looked at now; the new plan sets the next one.
        self._end_waits(key)
        return key

    def _end_waits(self, key: K) -> None:
        self._rests.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _next_key(self) -> K | None:
        if (line := self._next_line()) is None:
            spare = not self._working or len(self._working) + 1 < self._workers
            return self._idle_keys.popitem(last=False)[0] if self._idle_keys and spare else None
        key = line.popleft()
        if line:
            self._lines.move_to_end(self._group(key))
        else:
            del self._lines[self._group(key)]
        self._observe_latency(_now() - self._waiting.pop(key))
        return key

    def _next_line(self) -> deque[K] | None:
        busy = Counter(map(self._group, self._working))
        for group, line in self._lines.items():  # finds one at once, or there are few
            if group not in busy:
                return line
        if not self._lines or len(self._working) + 1 >= self._workers:
            return None  # the last free one is kept for a group that has none
        return self._lines[min(self._lines, key=busy.__getitem__)]

    def _ring(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)


def _now() -> float:
    return asyncio.get_running_loop().time()


#: Between two looks the clock and time itself differ by more only if the clock was set.
_SET: Final = timedelta(seconds=5)


class OperatorClock:
    """The operator's time, and since when it has seen and acted without a gap.

    Deadlines are stored as UTC, so the clock is the machine's. The start of a gang counts no time
    from before that was set (then ``stepped()`` is called), and none in which the operator saw
    nothing, not even in ``tolerance`` seconds, or led nothing. Each of ``namespaces`` has its own
    lists and watches; None: one for all.
    """

    def __init__(
        self,
        tolerance: float = 60.0,
        *,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
        stepped: Callable[[], None] = lambda: None,
        namespaces: Sequence[str] = (),
    ) -> None:
        self._stepped = stepped
        self._wall, self._monotonic, self._tolerance = wall, monotonic, tolerance
        self._at, self._shown = monotonic(), wall()
        served = namespaces or (None,)
        self._received_at: dict[str | None, float] = dict.fromkeys(served, self._at)
        self._seen_since: dict[str | None, datetime] = dict.fromkeys(served, self._shown)

    def now(self) -> datetime:
        """Return UTC."""
        at, wall = self._monotonic(), self._wall()
        off = wall - self._shown - timedelta(seconds=at - self._at)
        self._at, self._shown = at, wall
        if abs(off) > _SET:
            log.warning("the clock was set by %.0f s", off.total_seconds())
            self._count_from_now()
            self._stepped()
        return wall

    def received(self, namespace: str | None = None) -> None:
        """Record a sign of life of the API server about that namespace."""
        self.seen_since(namespace)
        self._received_at[self._served(namespace)] = self._monotonic()

    def interrupted(self) -> None:
        """Record that another operator, or none, has acted until this moment."""
        self.now()
        self._count_from_now()

    def seen_since(self, namespace: str | None = None) -> datetime:
        """Return since when this process has seen it and acted without a gap. Without sight: now.

        What cannot be seen of one namespace is no gap in another's sight.
        """
        served = self._served(namespace)
        if self._monotonic() - self._received_at[served] > self._tolerance:
            self._seen_since[served] = self.now()
        return self._seen_since[served]

    def _served(self, namespace: str | None) -> str | None:
        return namespace if namespace in self._received_at else None

    def _count_from_now(self) -> None:
        self._seen_since = dict.fromkeys(self._seen_since, self._shown)
