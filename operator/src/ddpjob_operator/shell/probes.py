"""/healthz, /readyz and /metrics on one port, for the kubelet and Prometheus.

/healthz fails when a loop of ours is stuck, not when the API server is away: a restart
cures the one and not the other. It is answered by the event loop that does the work, so a
blocked loop fails it by silence.

Whoever reaches the port may ask without end: the text of /metrics is made at most once a second,
a connection has one answer, and there are only so many connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

STUCK_AFTER = 180.0  # seconds; twice the longest that a watch may stay silent, and some

_KEPT = 1.0  # seconds; 2000 namespaces take 0.4 s to tell of
_MAX_CONNECTIONS = 64
# So many are taken at once. One that asks without delay is answered before so many newer ones
# came as make it the oldest.
_BACKLOG = 8


class Probes:
    """``idle`` tells for each loop how long it has done nothing; ``unready`` what is missing."""

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
        """Listen. Raises OSError if the port is taken."""
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
        stuck = {name: age for name, age in self._idle().items() if age > STUCK_AFTER}
        text = "".join(f"{name} has done nothing for {age:.0f} s\n" for name, age in stuck.items())
        return web.Response(text=text or "ok\n", status=503 if stuck else 200)

    def _readyz(self) -> web.Response:
        missing = self._unready()
        text = "".join(f"not yet: {what}\n" for what in missing)
        return web.Response(text=text or "ok\n", status=503 if missing else 200)

    def _metrics(self) -> web.Response:
        if self._now() >= self._text_until:
            self._text = generate_latest(self._registry)
            self._text_until = self._now() + _KEPT
        return web.Response(body=self._text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Server(web.Server):
    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """When there are too many, the oldest goes: an honest one has its answer by now."""
        super().connection_made(handler, transport)
        for oldest in self.connections[:-_MAX_CONNECTIONS]:
            if oldest.transport is not None:
                oldest.transport.abort()
