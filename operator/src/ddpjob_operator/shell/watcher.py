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
        self._heard: dict[str | None, float] = {}  # by namespace; None: of any
        self._missed: dict[str | None, float] = {}

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

    def missed(self, namespace: str | None, began: float) -> None:
        """A list, of one namespace or of all, that began then has found news.

        A watch that has told nothing of it between two such lists is taken for dead.
        """
        before = self._missed.get(namespace)
        if before is None or self._heard.get(namespace, 0.0) > before:
            self._missed[namespace] = began
            return
        log.warning("the watch of DDPJobs misses events, starting it again")
        self._missed.clear()
        self.restart()

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
        self.heard_at = self._heard[None] = self._heard[job.namespace] = time.monotonic()
        self._deliver(kind, job)


def _settle(ended: asyncio.Future[str], reason: str) -> None:
    if not ended.done():
        ended.set_result(reason)
