"""Bring the DDPJobs into the store: by kopf's watch, and by a list now and then.

app.py runs one JobWatcher, and a Resync per served namespace, so that one without rights holds up
no other's jobs. Only a list shows a job that was deleted during a gap of the watch.

Of kopf only on.event and on.login are used: no annotation, no finalizer, no patch, no Event of
kopf's. Its session is ours, so that kopf gets only slim records of a list: it would decode whole
pages at once. It runs in a thread with a separate event loop, where it is also imported (that
takes a second): when kopf stops, or gives up on a watch, it cancels every task that was created in
its loop after it began, and in a main thread it would take over the process's signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import aiohttp

from ddpjob_contract import crd
from ddpjob_operator.core.objects import observe
from ddpjob_operator.settings import Credentials
from ddpjob_operator.shell.api import (
    JOBS,
    Api,
    ApiError,
    NotFound,
    Object,
    loads,
    read_lines,
    read_list,
    shallow,
)
from ddpjob_operator.shell.store import Key, Store

log = logging.getLogger(__name__)

Deliver = Callable[[str | None, observe.Job], None]

_PAUSE = 2.0  # seconds between two runs
_LOGIN_LIFETIME = timedelta(minutes=5)  # tokens are rotated; kopf itself reads one only once
_SLIM = "ddpjob"  # the field that holds a job's slim record
#: More than one request waits for: kopf starts over for each, and JobWatcher if it gives up.
_BACKOFFS = (1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 1000)


class JobWatcher:
    """Runs kopf; calls ``deliver(type, job)`` on the loop that ``run`` is on.

    ``type`` is None for an object of a list, else ADDED, MODIFIED or DELETED.
    """

    def __init__(
        self, credentials: Credentials, namespaces: tuple[str, ...], deliver: Deliver
    ) -> None:
        self._credentials, self._namespaces, self._deliver = credentials, namespaces, deliver
        self._stop = threading.Event()
        self.received_at = time.monotonic()  # of the last event

    async def run(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Run kopf for ever, each time after ``ready``: kopf looks for the CRD only once."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await ready()
                self._stop = threading.Event()
                ended: asyncio.Queue[str] = asyncio.Queue()
                body = (loop, ended, self._stop)
                threading.Thread(target=self._thread, args=body, name="kopf", daemon=True).start()
                reason = await ended.get()
                log.warning("the watch of DDPJobs ended (%s), starting it again", reason)
                await asyncio.sleep(_PAUSE)
        finally:
            self._stop.set()

    def _thread(
        self, loop: asyncio.AbstractEventLoop, ended: asyncio.Queue[str], stop: threading.Event
    ) -> None:
        def deliver(kind: str | None, job: observe.Job) -> None:
            if not stop.is_set():
                loop.call_soon_threadsafe(self._on_event, kind, job)

        reason = "stopped"
        try:
            run_kopf(self._credentials, self._namespaces, deliver, stop)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        # The loop is closed when the operator ended first: then nothing waits for the answer.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.put_nowait, reason)

    def _on_event(self, kind: str | None, job: observe.Job) -> None:
        self.received_at = time.monotonic()
        self._deliver(kind, job)


def run_kopf(
    credentials: Credentials, namespaces: tuple[str, ...], deliver: Deliver, stop: threading.Event
) -> None:
    """Run until ``stop`` is set, or until kopf gives up and raises.

    ``deliver(type, job)`` must not fail: kopf logs what a handler raises and never retries.
    """
    import kopf  # in its thread, for it takes a second

    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        session = _session(credentials)
        expires = "Authorization" in session.headers
        return kopf.AiohttpSession(
            aiohttp_session=session,
            server=credentials.server,
            default_namespace=credentials.namespace,
            expiration=datetime.now(UTC) + _LOGIN_LIFETIME if expires else None,
        )

    @kopf.on.event(crd.GROUP, crd.VERSION, crd.PLURAL, registry=registry)
    async def on_event(event: Any, **_: Any) -> None:
        obj = event["object"]
        deliver(event["type"], obj.get(_SLIM) or observe.job(obj))

    async def run() -> None:
        try:
            await kopf.operator(
                registry=registry,
                settings=_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=stop,
            )
        finally:
            # A thread of kopf's waits for the flag, and asyncio.run waits for that thread.
            stop.set()

    asyncio.run(run())


def _session(credentials: Credentials) -> aiohttp.ClientSession:
    authorization = credentials.authorization()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=credentials.ssl_context() or True),
        headers={"Authorization": authorization} if authorization else {},
        proxy=credentials.proxy,
        response_class=_Response,
    )


class _Response(aiohttp.ClientResponse):
    """An answer as kopf sees it: kopf asks for ``json()``, or streams a watch."""

    async def json(self, **_: Any) -> Any:
        if self.status < 300 and self.url.path.endswith(f"/{crd.PLURAL}"):
            items, rest = await read_list(self.content.iter_any(), _slim)
            return {**rest, "items": items}
        return loads(await self.read())

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.url.query.get("watch") == "true" and self.status < 300:
            self.content = _Watch(self.content)  # type: ignore[assignment]
        return self


class _Watch:
    """The lines of a watch; those nested too deep for kopf are cut."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)  # aiohttp's own business

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        async for line in read_lines(self._content.iter_any()):
            yield shallow(line) + b"\n"


def _slim(obj: Object) -> Object:
    meta = {name: obj["metadata"].get(name) for name in ("namespace", "name", "uid")}
    return {"metadata": meta, _SLIM: observe.job(obj)}


def _settings() -> Any:
    import kopf

    class NoDiffBase(kopf.DiffBaseStorage):
        """Keeps no diff base: kopf would copy each event three times to compare it."""

        def build(self, **_: Any) -> Any:
            return {}

        def fetch(self, **_: Any) -> Any:
            return None

        def store(self, **_: Any) -> None:
            """Store nothing in the object."""

    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.chunk_size = 500
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    settings.networking.request_timeout = 300  # our decoding of a list counts as well
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = _BACKOFFS
    settings.queueing.exit_timeout = 1
    settings.queueing.idle_timeout = 0.2  # it keeps an object for so long
    settings.persistence.diffbase_storage = NoDiffBase()
    return settings


_RETRY = 2.0


class Resync:
    """Lists one namespace, or all (None), every ``seconds``.

    ``changed(key)`` is called for each job with news, also one that vanished, ``idle(key)`` for all
    others; ``received()`` as a list is read, however long that takes. ``answered`` is set once it
    was read, or refused.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        namespace: str | None,
        changed: Callable[[Key], None],
        idle: Callable[[Key], None],
        seconds: float = 30.0,
        received: Callable[[], None] = lambda: None,
    ) -> None:
        self._api, self._store = api, store
        self._namespace = namespace
        self._where = f" of namespace {namespace}" if namespace else ""
        self._changed, self._idle, self._seconds = changed, idle, seconds
        self._news: set[Key] = set()  # of a list, until it was read whole
        self._received = received
        self.synced, self.answered = asyncio.Event(), asyncio.Event()
        self.received_at = time.monotonic()
        self.alive_at = time.monotonic()
        self._logged = ""

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
                self._log_trouble("")
            except ApiError as error:
                self._log_trouble(self._explain(error))
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
            log.info("%s/%s: deleted, and the watch did not report it", *key)
        for key in (*gone, *self._news):
            self._changed(key)
        self._news.clear()
        for key in self._store.keys_in(self._namespace):
            self._idle(key)

    def _take(self, before: Mapping[str, str], obj: Object) -> str:
        self.alive_at = time.monotonic()
        self._received()
        meta = obj["metadata"]
        if self._store.put_read_job(obj, before):
            self._news.add((meta["namespace"], meta["name"]))
        return str(meta["uid"])

    def _log_trouble(self, trouble: str) -> None:
        """Log each kind of trouble once, and its end once."""
        if trouble and trouble != self._logged:
            log.error("%s; trying again until it works", trouble)
        elif self._logged and not trouble:
            log.info("the API server serves DDPJobs%s now", self._where)
        self._logged = trouble

    def _explain(self, error: ApiError) -> str:
        if isinstance(error, NotFound):
            name = f"{crd.KIND}s ({crd.PLURAL}.{crd.GROUP})"
            return f"the cluster does not know {name}: kubectl apply -f manifests/crd.yaml"
        if error.code == 0:
            return f"no answer from the API server: {error.message}"
        return f"cannot list {crd.PLURAL}{self._where}: {error}"


async def wait_for_crd(api: Api) -> None:
    """Return once the API server serves DDPJobs: kopf looks for them only once."""
    while True:
        with contextlib.suppress(ApiError):  # Resync.run() says why
            groups = await api.discover("/apis")
            kinds = await api.discover(f"/apis/{crd.GROUP}/{crd.VERSION}")
            known = [*groups.get("groups", ()), *kinds.get("resources", ())]
            if {crd.GROUP, crd.PLURAL} <= {one["name"] for one in known}:
                return
        await asyncio.sleep(1.0)
