"""Send a run's curves to sinks, each with its own queue and thread.

Progress calls it, on rank 0 only. A row that a sink refuses is tried again a few times; a sink that
fails, or is so slow that its queue is full, loses values, with one warning. Neither ends training
nor delays it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from ddpjob_trainer.telemetry.console import say

#: The most rows waiting for a sink: an hour without a network, at a row per second.
MAX_WAITING: Final = 4096
#: The newest of them, which a snapshot keeps.
MAX_KEPT: Final = 256
#: So long the end of a run waits for sinks: a short run may end before a client is imported.
CLOSE_SECONDS: Final = 60.0
#: And so long if the process must end soon: a snapshot keeps the rest.
HURRY_SECONDS: Final = 1.0
#: Pauses before another try: a row so often, then it is dropped; opening, for ever.
_PAUSES: Final = (1.0, 4.0, 16.0)
_LONG_PAUSE: Final = 60.0


Row = tuple[int, Mapping[str, float]]  # step, values by name


class Sink(Protocol):
    """Takes numbers by step. One thread calls all methods, one at a time.

    An exception is logged once, and the call is made again later. After a killed run the steps
    after ``step`` come again, with the same values: together they are one curve.
    """

    def open(self, step: int) -> None:
        """Begin after ``step`` finished steps (0: a fresh start). Called first."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step. A step may come several times, with other names."""
        ...

    def close(self) -> None:
        """Pass on the rest. Called once, last; not when the process is killed."""
        ...


class Called:
    """The function of start(log=...) as a sink."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], None]) -> None:
        self._function = function

    def open(self, step: int) -> None:
        """Do nothing: a function needs no opening."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call the function with a copy, which it may change."""
        self._function(step, dict(values))

    def close(self) -> None:
        """Do nothing: the function owns its files."""


class Sinks:
    """All sinks of a run, by name."""

    def __init__(self, sinks: Mapping[str, Sink] | None = None) -> None:
        self._feeds = [_Feed(name, sink) for name, sink in (sinks or {}).items()]

    def open(self, step: int, untaken: Mapping[str, Sequence[Row]] | None = None) -> None:
        """See Sink.open. ``untaken``: of the process before, as far as the snapshot knows."""
        for feed in self._feeds:
            feed.start(step)
            for row in (untaken or {}).get(feed.name, ()):
                feed.put(row)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink.log. Returns at once."""
        for feed in self._feeds:
            feed.put((step, values))

    def untaken(self) -> dict[str, list[Row]]:
        """Return by sink the newest rows still waiting, a few at most.

        A snapshot keeps them: a process that resumes from it does not publish these steps again.
        """
        waiting = {feed.name: feed.waiting()[-MAX_KEPT:] for feed in self._feeds}
        return {name: rows for name, rows in waiting.items() if rows}

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

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._rows: deque[Row] = deque()  # the first is the one that the sink is taking
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._finishing = False
        self._failed = False
        self._slow = False

    def start(self, step: int) -> None:
        # A daemon: a hanging client must not keep the process alive.
        self._thread = threading.Thread(
            target=self._work, args=(step,), name=f"sink {self.name}", daemon=True
        )
        self._thread.start()

    def put(self, row: Row) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        with self._changed:
            if len(self._rows) < MAX_WAITING:
                self._rows.append(row)
                self._changed.notify()
                return
        if not self._slow:
            self._slow = True
            say(0, f"warning: {self.name} is too slow or does not answer: values are left out")

    def waiting(self) -> list[Row]:
        with self._changed:
            return list(self._rows)

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            say(0, f"warning: {self.name} has not taken all values: it does not answer")

    def _work(self, step: int) -> None:
        pauses = itertools.chain(_PAUSES, itertools.repeat(_LONG_PAUSE))
        if not self._done(partial(self._sink.open, step), pauses):
            return
        while (row := self._next()) is not None:
            self._done(partial(self._sink.log, *row), _PAUSES)
            with self._changed:
                self._rows.popleft()
        self._done(self._sink.close, ())

    def _next(self) -> Row | None:
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._finishing)
            return self._rows[0] if self._rows else None

    def _done(self, call: Callable[[], None], pauses: Iterable[float]) -> bool:
        """Call until success or the end; return whether it succeeded."""
        pauses = iter(pauses)
        while True:
            try:
                call()
            except Exception as error:  # a service's client may raise anything
                self._tell(error)
                pause = next(pauses, None)
                if isinstance(error, ImportError) or pause is None or self._ends_within(pause):
                    return False
            else:
                return True

    def _ends_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._finishing, seconds)

    def _tell(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            text = str(error).strip().partition("\n")[0] or type(error).__name__
            say(0, f"warning: {self.name} takes no values: {text}; training goes on")
