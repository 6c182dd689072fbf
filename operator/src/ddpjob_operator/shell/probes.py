"""/healthz, /readyz and /metrics on one port, for the kubelet and Prometheus.

/healthz fails when a loop of ours is stuck, but stays well while the API server is away: a restart
cures only the former. The event loop that does the work answers it, so a blocked loop fails it by
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

STUCK_AFTER = 180.0  # seconds; twice the longest that a watch may stay silent, and some


class Probes:
    """The server; ``idle`` gives each loop's idle time, ``unready`` the missing parts."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        idle: Callable[[], Mapping[str, float]],
        unready: Callable[[], list[str]],
    ) -> None:
        self._host, self._registry = host, registry
        self._idle, self._unready = idle, unready
        pages = web.Application()
        pages.router.add_get("/healthz", self._healthz)
        pages.router.add_get("/readyz", self._readyz)
        pages.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(pages, access_log=None, shutdown_timeout=0.5)
        self.port = port

    async def start(self) -> None:
        """Listen; raise OSError if the port is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host or None, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        stuck = {name: age for name, age in self._idle().items() if age > STUCK_AFTER}
        text = "".join(f"{name} has done nothing for {age:.0f} s\n" for name, age in stuck.items())
        return web.Response(text=text or "ok\n", status=503 if stuck else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = self._unready()
        text = "".join(f"not yet: {what}\n" for what in missing)
        return web.Response(text=text or "ok\n", status=503 if missing else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
