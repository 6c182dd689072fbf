"""Keep kopf running in a thread with a separate event loop, whatever ends it.

app.py runs it. When kopf stops, or gives up on a watch, it cancels every task that was created in
its loop after it began, so it must not share ours; in a main thread it would also take over the
process's signals. The resync (resync.py) finds what a gap between two runs hides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api.credentials import Credentials

log = logging.getLogger(__name__)

_PAUSE = 2.0  # seconds between two runs


class JobWatcher:
    """Runs kopf; calls ``deliver(type, job)`` on the loop that ``run`` is on.

    ``type`` is None for an object of a list, else ADDED, MODIFIED or DELETED.
    """

    def __init__(
        self,
        credentials: Credentials,
        namespaces: tuple[str, ...],
        deliver: Callable[[str | None, observe.Job], None],
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
            from ddpjob_operator.shell.watch.handlers import run_kopf  # takes a second

            run_kopf(self._credentials, self._namespaces, deliver, stop)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        # The loop is closed when the operator ended first: then nothing waits for the answer.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.put_nowait, reason)

    def _on_event(self, kind: str | None, job: observe.Job) -> None:
        self.received_at = time.monotonic()
        self._deliver(kind, job)
