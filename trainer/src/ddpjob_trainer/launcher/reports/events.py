"""Write the launcher's event log from a thread, since its volume may be dead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

from ddpjob_trainer.telemetry.event_log import EventLog

_END_SECONDS = 1.0


class Events:
    """Appends to ``log``; without one it drops the lines."""

    def __init__(self, log: EventLog | None) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._log = log
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def write(self, event: str, **fields: Any) -> None:
        """Queue a line. Never blocks."""
        self._queue.put((event, fields))

    def end(self) -> None:
        """Wait until all is written, a second at most."""
        self._queue.put(None)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            if self._log is not None:
                self._log.write(line[0], **line[1])
