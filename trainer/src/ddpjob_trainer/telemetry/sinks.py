"""Send a run's curves to sinks, each with its own queue and thread.

Progress calls it, on rank 0 only. A sink that fails, or is so slow that its queue is full, loses
values, with one warning. Neither ends training nor delays it. After a killed run the steps behind
its snapshot come again, with the same values: together they are one curve.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from ddpjob_trainer.telemetry.console import say

#: The most rows waiting for a sink: an hour without a network, at a row per second.
MAX_WAITING: Final = 4096
#: So long the end of a run waits for sinks: a short run may end before a client is imported.
CLOSE_SECONDS: Final = 60.0
#: And so long if the process must end soon.
HURRY_SECONDS: Final = 1.0

#: Takes numbers of a step, by name. A step may come several times, with other names.
Log = Callable[[int, dict[str, float]], None]
#: Opens a sink after so many finished steps (0: a fresh start).
Opener = Callable[[int], Log]


def tensorboard(directory: str, step: int) -> Log:
    """Write scalars for TensorBoard; hide later steps of an earlier process.

    Raises ImportError, OSError.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("the package is missing; pip install tensorboard") from error
    writer = SummaryWriter(directory, purge_step=step + 1)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a kill comes without notice

    return log


class Sinks:
    """All sinks of a run, by name."""

    def __init__(self, openers: Mapping[str, Opener] | None = None) -> None:
        self._feeds = [_Feed(name, opener) for name, opener in (openers or {}).items()]

    def open(self, step: int) -> None:
        """Begin after ``step`` finished steps."""
        for feed in self._feeds:
            feed.start(step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass numbers of a step on. Returns at once."""
        for feed in self._feeds:
            feed.put(step, values)

    def close(self, seconds: float) -> None:
        """Wait until all sinks have taken the rest, ``seconds`` at most. Safe to repeat."""
        feeds, self._feeds = self._feeds, []
        deadline = time.monotonic() + seconds
        for feed in feeds:
            feed.finish()
        for feed in feeds:
            feed.wait(max(0.0, deadline - time.monotonic()))


class _Feed:
    """One sink's queue and thread."""

    def __init__(self, name: str, opener: Opener) -> None:
        self._name = name
        self._opener = opener
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._slow = False
        self._refused = False

    def start(self, step: int) -> None:
        # A daemon: a hanging client must not keep the process alive.
        self._thread = threading.Thread(
            target=self._work, args=(step,), name=f"sink {self._name}", daemon=True
        )
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        if self._rows.qsize() < MAX_WAITING:
            self._rows.put((step, dict(values)))
        elif not self._slow:
            self._slow = True
            say(0, f"warning: {self._name} is too slow or does not answer: values are left out")

    def finish(self) -> None:
        self._rows.put(None)

    def wait(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            say(0, f"warning: {self._name} has not taken all values: it does not answer")

    def _work(self, step: int) -> None:
        try:
            log = self._opener(step)
        except Exception as error:  # a service's client may raise anything
            self._failed(error)
            return
        while (row := self._rows.get()) is not None:
            try:
                log(*row)
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._refused:
            self._refused = True
            text = str(error).strip().partition("\n")[0] or type(error).__name__
            say(0, f"warning: {self._name} takes no values: {text}; training goes on")
