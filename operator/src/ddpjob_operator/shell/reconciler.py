"""Handle one key at a time: snapshot, plan, actions, the next look.

The work queue's workers call it. Trouble with one job stays with it: it is logged with its key and
uid and tried again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from ddpjob_operator import __version__
from ddpjob_operator.core.actions import Body
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.json_read import integer, mapping
from ddpjob_operator.core.plan import plan
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.cache.store import JobState, Key, RewoundError, Store
from ddpjob_operator.shell.clock import Clock
from ddpjob_operator.shell.executor import Executor, JobGoneError, NotLeadingError
from ddpjob_operator.shell.metrics import Metrics
from ddpjob_operator.shell.workqueue import WorkQueue

log = logging.getLogger(__name__)

_BUSY_ROUNDS = 25  # busy planning rounds in a row, then slower
_BUSY_PAUSE = 1.0
#: A look at a large gang takes long, and its pods' events come in thousands. After one without
#: actions the job rests so many times its length: looking takes at most a tenth of the time.
_REST = 9.0
_LONGEST_REST = 0.5


class Reconciler:
    """The work that the queue's workers do.

    ``known(namespace)``: its jobs and pods have been listed; until then its jobs are left alone.
    ``gang_api()``: the version of the API that serves PodGroups, "" without one. ``lease``: the
    operator's, by which jobs name it; "": they do not.
    """

    def __init__(
        self,
        store: Store,
        queue: WorkQueue[Key],
        executor: Executor,
        metrics: Metrics,
        leads: Callable[[], bool],
        clock: Clock,
        metrics_from: tuple[Body, ...] = (),
        known: Callable[[str], bool] = lambda _: True,
        gang_api: Callable[[], str] = str,
        lease: str = "",
    ) -> None:
        self._store, self._queue, self._executor = store, queue, executor
        self._metrics, self._leads, self._clock = metrics, leads, clock
        self._metrics_from, self._known = metrics_from, known
        self._gang_api, self._lease = gang_api, lease
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
        except errors.ApiError as error:
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

        ``grew``: the attempt has a replica that it never had, or one more is done. A gang of large
        pods is created in hundreds of planning rounds, and its start has a deadline; a thousand
        replicas that end one by one are as many writes, and a loss among them must not wait.
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
