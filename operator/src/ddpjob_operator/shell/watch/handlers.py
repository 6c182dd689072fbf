"""Embed kopf: take its watch of DDPJobs, and hand each event on.

kopf_thread.py runs it in kopf's thread, where it is imported: importing kopf takes a second. Only
on.event and on.login are used: no annotation, no finalizer, no patch, no Event of kopf's. Its
session is ours, so that kopf gets only slim records of a list: it would decode whole pages at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import kopf

from ddpjob_contract import crd
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import decode
from ddpjob_operator.shell.api.credentials import Credentials

Deliver = Callable[[str | None, observe.Job], None]

_LOGIN_LIFETIME = timedelta(minutes=5)  # tokens are rotated; kopf itself reads one only once
_SLIM = "ddpjob"  # the field that holds a job's slim record
#: More than one request waits for: kopf starts over for each, and JobWatcher if it gives up.
_BACKOFFS = (1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 1000)


def run_kopf(
    credentials: Credentials, namespaces: tuple[str, ...], deliver: Deliver, stop: threading.Event
) -> None:
    """Run until ``stop`` is set, or until kopf gives up and raises.

    ``deliver(type, job)`` must not fail: kopf logs what a handler raises and never retries.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return _connection(credentials)

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


def _connection(credentials: Credentials) -> kopf.AiohttpSession:
    authorization = credentials.authorization()
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=credentials.ssl_context() or True),
        headers={"Authorization": authorization} if authorization else {},
        proxy=credentials.proxy,
        response_class=_Response,
    )
    return kopf.AiohttpSession(
        aiohttp_session=session,
        server=credentials.server,
        default_namespace=credentials.namespace,
        expiration=datetime.now(UTC) + _LOGIN_LIFETIME if authorization else None,
    )


class _Response(aiohttp.ClientResponse):
    """An answer as kopf sees it: kopf asks for ``json()``, or streams a watch."""

    async def json(self, **_: Any) -> Any:
        if self.status < 300 and self.url.path.endswith(f"/{crd.PLURAL}"):
            items, rest = await decode.read_list(self.content.iter_any(), _slim)
            return {**rest, "items": items}
        return decode.loads(await self.read())

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
        async for line in decode.lines(self._content.iter_any()):
            yield decode.shallow(line) + b"\n"


def _slim(obj: decode.Object) -> decode.Object:
    meta = {name: obj["metadata"].get(name) for name in ("namespace", "name", "uid")}
    return {"metadata": meta, _SLIM: observe.job(obj)}


def _settings() -> kopf.OperatorSettings:
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
    settings.persistence.diffbase_storage = _NoDiffBase()
    return settings


class _NoDiffBase(kopf.DiffBaseStorage):
    """Keeps no diff base: kopf would copy each event three times to compare it."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        """Store nothing in the object."""
