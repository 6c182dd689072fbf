"""Queue keys that want work: each once, each with one worker at a time.

app.py runs its workers on the reconciler. The rules are those of client-go's work queue: a key that
comes back while it is being worked on is worked on once more afterwards; a key that fails comes
back after a growing delay. Beyond them a key may be given a rest: requests meanwhile are answered
at its end. And each group of keys has a line, and lines take turns: a hundred keys of one group
that come back and back make no key of another wait for more than one of them. A worker goes to the
group that has fewest, and the last free one only to a group that has none: though all work of one
group hangs, a key of another finds a worker at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FIRST_DELAY = 0.1  # seconds, doubled by each failure in a row
_MAX_DELAY = 30.0


class WorkQueue(Generic[K]):
    """The queue; calls ``observe_latency(seconds)`` with the time each key spent in line.

    ``group(key)``: keys of one group share a line; without it each key is a group.
    """

    def __init__(
        self,
        observe_latency: Callable[[float], None] = lambda _: None,
        group: Callable[[K], Hashable] = lambda key: key,
    ) -> None:
        self._lines: OrderedDict[Hashable, deque[K]] = OrderedDict()  # next group first
        self._group = group
        self._waiting: dict[K, float] = {}  # in line, since when
        self._working: set[K] = set()  # one for each worker that is not free
        self._workers = 0
        self._again: set[K] = set()  # came back while being worked on
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._rests: dict[K, float] = {}  # until when
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # set when a worker finished
        self._closed = False
        self._observe_latency = observe_latency

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Put the key in line, once."""
        if key in self._waiting:
            return
        if key in self._working:
            self._again.add(key)
            return
        rest = self._rests.get(key, 0.0) - _now()
        if rest > 0:
            self.add_after(key, rest)
            return
        self._waiting[key] = _now()
        self._lines.setdefault(self._group(key), deque()).append(key)
        self._wake.set()

    def add_after(self, key: K, delay: float) -> None:
        """Put the key in line after ``delay`` seconds, or earlier if that was asked for."""
        if delay <= 0:
            self.add(key)
            return
        due = _now() + delay
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(due, self._ring, key)

    def add_failed(self, key: K, at_least: float | None = None) -> float:
        """Put the key in line after its back-off, or ``at_least``; return the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(failures, 20))
        delay = max(delay * random.uniform(0.8, 1.2), at_least or 0.0)
        self.add_after(key, delay)
        return delay

    def rest(self, key: K, seconds: float) -> None:
        """Let nobody work on the key for so long from now."""
        self._rests[key] = _now() + seconds

    def forgive(self, key: K) -> None:
        """Reset the back-off of a key that was worked on well."""
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Drop the timer and the back-off of a key whose object is gone."""
        self._failures.pop(key, None)
        self._rests.pop(key, None)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Hand out no more keys; running work goes on."""
        self._closed = True
        self._wake.clear()

    async def drained(self) -> None:
        """Wait, after close, until no worker is busy."""
        while self._working:
            self._idle.clear()
            await self._idle.wait()

    async def run(self, workers: int, work: Callable[[K], Awaitable[None]]) -> None:
        """Work until cancelled; an error of ``work`` ends the run, as an ExceptionGroup."""
        self._workers = workers
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self._worker(work), name=f"worker-{number}")

    async def _worker(self, work: Callable[[K], Awaitable[None]]) -> None:
        while True:
            key = await self._take()
            try:
                await work(key)
            finally:
                self._working.discard(key)
                self._idle.set()
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)
            await asyncio.sleep(0)  # work that waited for nothing lets other tasks run

    async def _take(self) -> K:
        # A worker that ends its work looks here next, so only new keys wake a waiting one.
        while self._closed or (line := self._next_line()) is None:
            self._wake.clear()
            await self._wake.wait()
        key = line.popleft()
        if line:
            self._lines.move_to_end(self._group(key))
        else:
            del self._lines[self._group(key)]
        self._observe_latency(_now() - self._waiting.pop(key))
        self._working.add(key)
        self._rests.pop(key, None)
        # The timer's reason is looked at now; the new plan sets the next one.
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return key

    def _next_line(self) -> deque[K] | None:
        busy = Counter(map(self._group, self._working))
        for group, line in self._lines.items():  # finds one at once, or there are few
            if group not in busy:
                return line
        if not self._lines or len(self._working) + 1 >= self._workers:
            return None  # the last free one is kept for a group that has none
        return self._lines[min(self._lines, key=busy.__getitem__)]

    def _ring(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
