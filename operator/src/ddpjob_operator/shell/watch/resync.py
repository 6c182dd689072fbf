"""List all DDPJobs now and then, to find what the watch missed.

app.py runs one per served namespace, so that one without rights holds up no other's jobs. Only a
list shows a job that was deleted during a watch gap. The first list also shows whether the CRD is
installed at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from ddpjob_contract import crd
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import JOBS, Api, Object
from ddpjob_operator.shell.cache.store import Key, Store

log = logging.getLogger(__name__)

_RETRY = 2.0


class Resync:
    """Lists one namespace, or all (None), every ``seconds``.

    ``changed(key)`` is called for every job, new, old and vanished; ``received()`` as a list is
    read, however long that takes. ``answered`` is set once it was read, or refused.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        namespace: str | None,
        changed: Callable[[Key], None],
        seconds: float = 30.0,
        received: Callable[[], None] = lambda: None,
    ) -> None:
        self._api, self._store = api, store
        self._namespace = namespace
        self._changed, self._seconds = changed, seconds
        self._received = received
        self.synced, self.answered = asyncio.Event(), asyncio.Event()
        self.received_at = time.monotonic()
        self.alive_at = time.monotonic()
        self._told = ""

    async def run(self) -> None:
        """List until cancelled; wait out trouble with the API server.

        Raises RewoundError when etcd was restored from a backup.
        """
        while True:
            delay = self._seconds
            try:
                await self._list_all()
                self.received_at = time.monotonic()
                self.synced.set()
                self._tell("")
            except errors.ApiError as error:
                self._tell(self._explain(error))
                delay = min(max(_RETRY, error.retry_after or 0.0), self._seconds)
            self.answered.set()
            self.alive_at = time.monotonic()
            await asyncio.sleep(delay)

    async def _list_all(self) -> None:
        newest = self._store.newest(JOBS.plural)
        take = partial(self._take, self._store.job_versions())
        listing = await self._api.list_all(JOBS, self._namespace, keep=take)
        self._received()
        uids, version = listing.items, listing.resource_version
        self._store.check_list(JOBS.plural, version, newest)
        gone = self._store.drop_vanished_jobs(self._namespace, uids, version)
        for key in gone:
            log.info("%s/%s: vanished without a word from the watch", *key)
        for key in (*gone, *self._store.keys_in(self._namespace)):
            self._changed(key)

    def _take(self, before: Mapping[str, str], obj: Object) -> str:
        self.alive_at = time.monotonic()
        self._received()
        self._store.put_read_job(obj, before)
        return str(obj["metadata"]["uid"])

    def _tell(self, trouble: str) -> None:
        """Log each kind of trouble once, and its end once."""
        if trouble and trouble != self._told:
            log.error("%s; trying again until it works", trouble)
        elif self._told and not trouble:
            log.info("the API server serves DDPJobs%s now", self._where)
        self._told = trouble

    @property
    def _where(self) -> str:
        return f" of namespace {self._namespace}" if self._namespace else ""

    def _explain(self, error: errors.ApiError) -> str:
        match error:
            case errors.NotFound():
                return (
                    f"the cluster does not know {crd.KIND}s ({crd.PLURAL}.{crd.GROUP}):"
                    " kubectl apply -f manifests/crd.yaml"
                )
            case errors.Forbidden():
                return f"not allowed to list {crd.PLURAL}{self._where}: {error.message}"
            case _ if error.code == 0:
                return f"no answer from the API server: {error.message}"
            case _:
                return f"cannot list {crd.PLURAL}{self._where}: {error}"


async def wait_for_crd(api: Api) -> None:
    """Return once the API server serves DDPJobs: kopf looks for them only once."""
    while True:
        with contextlib.suppress(errors.ApiError):  # Resync.run() says why
            groups = await api.discover("/apis")
            kinds = await api.discover(f"/apis/{crd.GROUP}/{crd.VERSION}")
            known = [*groups.get("groups", ()), *kinds.get("resources", ())]
            if {crd.GROUP, crd.PLURAL} <= {one["name"] for one in known}:
                return
        await asyncio.sleep(1.0)
