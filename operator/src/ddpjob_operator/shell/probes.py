"""Serve /healthz, /readyz and /metrics on one port, for the kubelet and Prometheus.

/healthz fails when a loop of ours is stuck, but stays well while the API server is away: a restart
cures only the former. The event loop that does the work answers it, so a blocked loop fails it by
silence.

Strangers may ask without end: the text of /metrics is made at most once a second, a connection has
one answer, and there are only so many connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

STUCK_AFTER = 180.0  # seconds; twice the longest that a watch may stay silent, and some

_KEPT = 1.0  # seconds; 2000 namespaces take 0.4 s to format
_MAX_CONNECTIONS = 64
# So many connections are open at once. A client that asks without delay has its answer before so
# many newer ones come that it is the oldest.
_BACKLOG = 8


class Probes:
    """The server; ``idle`` gives each loop's idle time, ``unready`` the missing parts."""

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
        """Listen; raise OSError if the port is taken."""
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
        """Close the oldest of too many connections: an honest client has its answer by now."""
        super().connection_made(handler, transport)
        for oldest in self.connections[:-_MAX_CONNECTIONS]:
            if oldest.transport is not None:
                oldest.transport.abort()
