"""Keeps the store's pods true: one paged list, then a watch with bookmarks, for ever.

Only pods that carry our job-uid label are asked for. What a new list no longer shows has
been deleted, whatever events were lost meanwhile; nothing else notices that.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from ddpjob_operator.core import observe
from ddpjob_operator.shell import errors
from ddpjob_operator.shell.api import PODS, Api, Object
from ddpjob_operator.shell.store import Key, Store

log = logging.getLogger(__name__)

_MAX_BACKOFF = 30.0
_WATCH_TRIES = 5  # in a row without a single event, then list again
_BRIEF = 1.0  # seconds; a watch that ends sooner, and empty, has failed


class PodInformer:
    """The pods of one namespace, or of all (None). ``changed(key)`` is told which job moved.

    ``relist_seconds``: list anew now and then, as a guard against events that never came.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        namespace: str | None,
        changed: Callable[[Key], None],
        relist_seconds: float = 600.0,
    ) -> None:
        self._api, self._store, self._namespace = api, store, namespace
        self._changed = changed
        self._relist_seconds = relist_seconds
        self._gone = 0  # times in a row that the server called our version too old
        self.synced = asyncio.Event()
        self.heard_at = time.monotonic()  # the server said something
        self.alive_at = time.monotonic()  # we did something; if not for long, we are stuck

    async def run(self) -> None:
        """List and watch until cancelled; trouble with the API server is waited out."""
        failures = 0
        while True:
            try:
                version = await self._list()
                failures = 0
                await self._watch_from(version)
            except errors.Gone:
                self._gone += 1
                self._mark_alive()
                log.info("pods: the watch is too old, listing again")
                if self._gone > 1:  # listing did not help: no storm of lists
                    await asyncio.sleep(_backoff(self._gone - 1))
            except errors.ApiError as error:
                failures += 1
                delay = max(_backoff(failures), error.retry_after or 0.0)
                log.warning("pods: %s; trying again in %.1f s", error, delay)
                self._mark_alive()
                await asyncio.sleep(delay)

    async def _list(self) -> str:
        listing = await self._api.list_all(PODS, self._namespace, observe.LABEL_JOB_UID)
        self._mark_heard()
        keys = self._store.replace_all_pods(
            self._namespace, listing.items, listing.resource_version
        )
        self.synced.set()
        for key in keys:
            self._changed(key)
        return listing.resource_version

    async def _watch_from(self, version: str) -> None:
        """Watch, and watch again where it ended; return when it is time for a new list."""
        until = time.monotonic() + self._relist_seconds * random.uniform(0.9, 1.1)
        failures = 0
        while failures < _WATCH_TRIES and time.monotonic() < until:
            began, seen = time.monotonic(), version
            try:
                events = self._api.watch(
                    PODS, self._namespace, version, selector=observe.LABEL_JOB_UID
                )
                async for kind, obj in events:
                    failures = self._gone = 0
                    self._mark_heard()
                    version = obj["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._apply(kind, obj)
                    if time.monotonic() >= until:
                        return
            except errors.Gone:
                raise
            except errors.ApiError as error:
                failures += 1
                delay = max(_backoff(failures), error.retry_after or 0.0)
                log.info("pods: %s; watching again in %.1f s", error, delay)
                await asyncio.sleep(delay)
            else:
                if seen == version and time.monotonic() - began < _BRIEF:
                    failures += 1  # the server lets nobody watch just now
                    await asyncio.sleep(_backoff(failures))
            self._mark_alive()

    def _apply(self, kind: str, obj: Object) -> None:
        deleted = kind == "DELETED"
        uid = obj["metadata"]["uid"]
        for key in {self._store.remove_pod(uid)} if deleted else self._store.put_pod(obj):
            if key is not None:
                self._changed(key)

    def _mark_alive(self) -> None:
        self.alive_at = time.monotonic()

    def _mark_heard(self) -> None:
        self.heard_at = self.alive_at = time.monotonic()


def _backoff(failures: int) -> float:
    ceiling: float = min(_MAX_BACKOFF, 0.2 * 2.0 ** min(failures, 20))
    return ceiling * random.uniform(0.8, 1.2)
