"""Send a run's curves to sinks, each with its own queue and thread.

Progress calls it, on rank 0 only. A sink that fails, or is so slow that its queue is full, loses
values, with one warning. Neither ends training nor delays it.
"""

from __future__ import annotations

import queue
import threading
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


class Sink:
    """One sink's queue and thread."""

    def __init__(self, name: str, opener: Opener) -> None:
        self._name = name
        self._opener = opener
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def start(self, step: int) -> None:
        """Begin after ``step`` finished steps."""
        # A daemon: a hanging client must not keep the process alive.
        self._thread = threading.Thread(target=self._work, args=(step,), daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Pass numbers of a step on. Returns at once."""
        if self._rows.qsize() < MAX_WAITING:
            self._rows.put((step, dict(values)))
        else:
            self._warn("is too slow or does not answer", "values are left out")

    def finish(self) -> None:
        """Let the thread end after the rest."""
        self._rows.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until the sink has taken the rest, ``seconds`` at most."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._warn("has not taken all values", "it does not answer")

    def _work(self, step: int) -> None:
        log: Log | None = None
        openers = [self._opener]  # tried once
        while (row := self._rows.get()) is not None:
            try:
                if openers:
                    log = openers.pop()(step)
                if log is not None:
                    log(*row)
            except Exception as error:  # a service's client may raise anything
                text = str(error).strip().partition("\n")[0] or type(error).__name__
                self._warn("takes no values", f"{text}; training goes on")

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            say(0, f"warning: {self._name} {what}: {text}")
