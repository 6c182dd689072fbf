"""Keeps kopf running in a thread with an event loop of its own, whatever ends it.

When kopf stops, or gives up on a watch, it cancels every task that was created in its loop
after it began; ours must live on. It also takes over the process's signals in a main thread.
What a gap between two runs swallows is found by the resync (resync.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from ddpjob_operator.core import observe
from ddpjob_operator.shell.credentials import Credentials

log = logging.getLogger(__name__)

_PAUSE = 2.0  # seconds between two runs


class JobWatcher:
    """``deliver(type, job)`` is called on the loop that ``run`` is on.

    ``type`` is None for what was listed, else ADDED, MODIFIED or DELETED.
    """

    def __init__(
        self,
        credentials: Credentials,
        namespaces: tuple[str, ...],
        deliver: Callable[[str | None, observe.Job], None],
    ) -> None:
        self._credentials, self._namespaces, self._deliver = credentials, namespaces, deliver
        self._stop = threading.Event()
        self.heard_at = time.monotonic()  # of the last event

    async def run(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Run kopf for ever; each time ``ready`` comes first, for kopf looks for the CRD once."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await ready()
                self._stop = threading.Event()
                ended: asyncio.Future[str] = loop.create_future()
                body = (loop, ended, self._stop)
                threading.Thread(target=self._thread, args=body, name="kopf", daemon=True).start()
                reason = await ended
                log.warning("the watch of DDPJobs ended (%s), starting it again", reason)
                await asyncio.sleep(_PAUSE)
        finally:
            self._stop.set()

    def restart(self) -> None:
        """End kopf; ``run`` begins anew."""
        self._stop.set()

    def _thread(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: asyncio.Future[str],
        stop: threading.Event,
    ) -> None:
        def deliver(kind: str | None, job: observe.Job) -> None:
            if not stop.is_set():
                loop.call_soon_threadsafe(self._on_event, kind, job)

        reason = "stopped"
        try:
            from ddpjob_operator.shell.handlers import run_kopf  # takes a second

            run_kopf(self._credentials, self._namespaces, deliver, stop)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        # The loop is closed when the operator ended first: then nobody waits for the answer.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, ended, reason)

    def _on_event(self, kind: str | None, job: observe.Job) -> None:
        self.heard_at = time.monotonic()
        self._deliver(kind, job)


def _settle(ended: asyncio.Future[str], reason: str) -> None:
    if not ended.done():
        ended.set_result(reason)
