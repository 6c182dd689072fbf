"""Keep the store's pods, nodes and Workloads current, by paged lists and watches with bookmarks.

app.py runs one per namespace and kind. Only pods with our job-uid label are asked for. A pod that a
new list does not show was deleted, though its events were lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.objects.workload import Workload
from ddpjob_operator.shell import nodes
from ddpjob_operator.shell.api import (
    NODES,
    PODS,
    WORKLOADS,
    Api,
    ApiError,
    Forbidden,
    Gone,
    Listing,
    NotFound,
    Object,
    Resource,
    version_number,
)
from ddpjob_operator.shell.store import Key, Store

log = logging.getLogger(__name__)

_MAX_BACKOFF = 30.0
_WATCH_TRIES = 5  # in a row without an event after the first moment, then list again
_BRIEF = 1.0  # seconds; a watch that ends sooner has failed, whatever it sent


class Informer(ABC):
    """Informer of one kind in one namespace, or in all (None); calls ``changed(key)``.

    ``relist_seconds``: list again now and then, as a guard against lost events.
    """

    resource: Resource
    selector = ""

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
        self._logged: tuple[object, ...] = ()  # what was said of the last trouble
        self.synced = asyncio.Event()
        self.answered = asyncio.Event()  # it was read once, or refused
        self.received_at = time.monotonic()  # the server's last sign of life
        self.alive_at = time.monotonic()  # our own last action; too long ago, we are stuck

    @abstractmethod
    def _keep(self, obj: Object) -> Any:
        """Take an object of a list as it arrives; return what ``_replace`` needs of it."""

    @abstractmethod
    def _replace(self, listing: Listing) -> Iterable[Key]:
        """Take the end of a full list; return the jobs that it concerns."""

    @abstractmethod
    def _apply(self, kind: str, obj: Object) -> Iterable[Key]:
        """Take an event; return the jobs that it concerns."""

    def _refused(self, error: ApiError) -> None:
        """Handle a refused list: the server's trouble, none of ours."""
        self.alive_at = time.monotonic()
        self.answered.set()

    def _log_trouble(self, error: ApiError) -> None:
        if error.args != self._logged:
            log.warning("%s: %s; trying again", self.resource.plural, error)
        self._logged = error.args

    async def run(self) -> None:
        """List and watch until cancelled; wait out trouble with the API server.

        Raises RewoundError when etcd was restored from a backup.
        """
        failures = 0
        while True:
            version = ""
            try:
                version = await self._list()
                failures = 0
                await self._watch_from(version)
            except Gone as error:
                self._gone += 1
                self._refused(error)
                log.info("%s: the watch is too old, listing again", self.resource.plural)
                if not version:
                    self._log_trouble(error)
                if self._gone > 1:  # listing did not help: no storm of lists
                    await asyncio.sleep(_backoff(self._gone - 1))
            except ApiError as error:
                failures += 1
                self._log_trouble(error)
                self._refused(error)
                await asyncio.sleep(_delay(failures, error))

    async def _list(self) -> str:
        newest = self._store.newest(self.resource.plural)
        listing = await self._api.list_all(
            self.resource, self._namespace, self.selector, keep=self._take
        )
        self._store.check_list(self.resource.plural, listing.resource_version, newest)
        self._mark_received()
        self._logged = ()
        keys = self._replace(listing)
        self.synced.set()
        self.answered.set()
        for key in keys:
            self._changed(key)
        return listing.resource_version

    def _take(self, obj: Object) -> Any:
        self.alive_at = time.monotonic()  # a whole list may take longer than we may seem stuck
        return self._keep(obj)

    async def _watch_from(self, version: str) -> None:
        """Watch, and watch again where it ended, until it is time for a new list."""
        until = time.monotonic() + self._relist_seconds * random.uniform(0.9, 1.1)
        failures = 0
        while failures < _WATCH_TRIES and time.monotonic() < until:
            began = time.monotonic()
            try:
                events = self._api.watch(
                    self.resource, self._namespace, version, selector=self.selector
                )
                async for kind, obj in events:
                    if time.monotonic() - began >= _BRIEF:
                        failures = self._gone = 0
                    self._mark_received()
                    version = obj["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        for key in self._apply(kind, obj):
                            self._changed(key)
                    if time.monotonic() >= until:
                        return
            except Gone:
                raise
            except ApiError as error:
                failures += 1
                delay = _delay(failures, error)
                log.info("%s: %s; watching again in %.1f s", self.resource.plural, error, delay)
                await asyncio.sleep(delay)
            else:
                if time.monotonic() - began < _BRIEF:
                    failures += 1  # the server refuses watches just now
                    await asyncio.sleep(_backoff(failures))
            self.alive_at = time.monotonic()

    def _mark_received(self) -> None:
        self.received_at = self.alive_at = time.monotonic()


class PodInformer(Informer):
    """Informer of the jobs' pods."""

    resource = PODS
    selector = crd.LABEL_JOB_UID

    def _keep(self, obj: Object) -> tuple[str, set[Key]]:
        return obj["metadata"]["uid"], self._store.put_pod(obj)

    def _replace(self, listing: Listing) -> Iterable[Key]:
        uids = [uid for uid, _ in listing.items]
        gone = self._store.drop_vanished_pods(self._namespace, uids, listing.resource_version)
        # Until the first list the namespace's jobs wait, those without pods included.
        waited = () if self.synced.is_set() else self._store.keys_in(self._namespace)
        return gone.union(waited, *(keys for _, keys in listing.items))

    def _apply(self, kind: str, obj: Object) -> Iterable[Key]:
        if kind != "DELETED":
            return self._store.put_pod(obj)
        meta = obj["metadata"]
        key = self._store.remove_pod(meta["uid"], version_number(meta.get("resourceVersion")))
        return () if key is None else (key,)


class NodeInformer(Informer):
    """Informer of all nodes, if the operator may read them; jobs do without otherwise."""

    resource = NODES

    def _keep(self, obj: Object) -> nodes.Slim:
        return self._store.nodes.slim(obj)

    def _replace(self, listing: Listing) -> Iterable[Key]:
        return self._store.keys_on(set(self._store.nodes.replace_all(listing.items)))

    def _apply(self, kind: str, obj: Object) -> Iterable[Key]:
        cache, name = self._store.nodes, obj["metadata"]["name"]
        news = cache.remove(name) if kind == "DELETED" else cache.put(cache.slim(obj))
        return self._store.keys_on({name}) if news else ()

    def _refused(self, error: ApiError) -> None:
        super()._refused(error)
        if isinstance(error, Forbidden):
            self._store.nodes.forget()
        # Nothing waits for nodes: until they are known Fence acts as Wait. Only a refusal of the
        # right to read them is reported as one.
        self.synced.set()


class WorkloadInformer(Informer):
    """Informer of the jobs' Workloads; without the API, or the right, none are known.

    Jobs with a queue's label wait for it, no other job does.
    """

    resource = WORKLOADS
    selector = crd.LABEL_JOB_UID

    def _keep(self, obj: Object) -> Workload:
        return self._store.workloads.put(obj)

    def _replace(self, listing: Listing) -> Iterable[Key]:
        uids = [one.uid for one in listing.items]
        self._store.workloads.replace_all(self._namespace, uids, listing.resource_version)
        return self._store.keys_in(self._namespace)

    def _apply(self, kind: str, obj: Object) -> Iterable[Key]:
        found = self._store.workloads.put(obj)
        if kind == "DELETED":
            self._store.workloads.remove((found.namespace, found.name), found.uid)
        return self._store.keys_of([(found.namespace, found.owner_uid)])

    def _refused(self, error: ApiError) -> None:
        super()._refused(error)
        if isinstance(error, NotFound | Forbidden):
            self._store.workloads.forget(self._namespace)


def _delay(failures: int, error: ApiError) -> float:
    """Bound the server's delay: a proxy's hour would be an hour of blindness."""
    return max(_backoff(failures), min(error.retry_after or 0.0, _MAX_BACKOFF))


def _backoff(failures: int) -> float:
    ceiling: float = min(_MAX_BACKOFF, 0.2 * 2.0 ** min(failures, 20))
    return ceiling * random.uniform(0.8, 1.2)
