"""Write standard output and error from threads, so a stalled reader blocks only itself.

Workers wait while there is no room, as they would at the pipe itself. The supervisor never does:
its lines beyond a bound are dropped, and their number is printed when there is room again.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import Final

from ddpjob_contract.text import clean

#: Workers wait for the reader beyond this.
_WORKERS_BYTES: Final = 64 * 1024
#: The bound for the launcher's own lines and the last output of ended workers.
_MAX_BYTES: Final = 4 * 1024 * 1024
_PIECE: Final = 64 * 1024  # so that a slow reader is distinguished from a stalled one
#: At the end: so long without the reader taking anything, and in all; in a hurry less.
_PATIENCE_SECONDS: Final = 5.0
_FLUSH_SECONDS: Final = 30.0
_HURRY_SECONDS: Final = 2.0


class _Sink:
    """One file, pipe or terminal; ``put`` never blocks."""

    def __init__(self, name: str) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bytes = 0  # in the queue, and what the thread is writing
        self._dropped = 0
        self._moved = False  # the reader has taken something
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, fd: int, data: bytes) -> None:
        with self._changed:
            if self._bytes + len(data) > _MAX_BYTES:
                self._dropped += data.count(b"\n") or 1
                return
            if self._dropped:
                lines = "1 line was" if self._dropped == 1 else f"{self._dropped} lines were"
                words = f"launcher: {lines} dropped: nobody read the log\n"
                self._dropped = 0
                data = words.encode() + data
            self._queue.append((fd, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < _WORKERS_BYTES)

    def flush(self, deadline: float) -> None:
        with self._changed:
            while self._bytes and (left := deadline - time.monotonic()) > 0:
                self._moved = False
                if not self._changed.wait_for(lambda: self._moved, min(left, _PATIENCE_SECONDS)):
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                fd, data = self._queue.popleft()
                while self._queue and self._queue[0][0] == fd and len(data) < _PIECE:
                    data += self._queue.popleft()[1]
            view = memoryview(data)
            while view:
                piece = view[: _write(fd, view[:_PIECE])]
                view = view[len(piece) :]
                with self._changed:
                    self._bytes -= len(piece)
                    self._moved = True
                    self._changed.notify_all()


def _write(fd: int, data: memoryview) -> int:
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:  # our output was made non-blocking, and its reader is slow
            select.select([], [fd], [])
        except OSError:
            return len(data)  # the reader is gone; training goes on


class Log:
    """The launcher's standard output and error. Where both are one file, order is kept."""

    def __init__(self) -> None:
        error = _Sink("stderr")
        self._sinks = {1: error if _same_file(1, 2) else _Sink("stdout"), 2: error}

    def say(self, text: str) -> None:
        """Print one line of the launcher. It may quote a volume, another pod or a program."""
        self.put(2, f"launcher: {clean(' '.join(text.splitlines()))}\n".encode())

    def put(self, fd: int, data: bytes) -> None:
        """Have bytes written to descriptor 1 or 2. Never blocks; drops what finds no room."""
        if data:
            self._sinks[fd].put(fd, data)

    def wait_for_room(self, fd: int) -> None:
        """Wait for the reader as long as it takes, before passing on workers' output."""
        self._sinks[fd].wait_for_room()

    def flush(self, *, hurry: bool = False) -> None:
        """Wait until all is written, but a bounded time for a reader that stalls.

        ``hurry``: the launcher was asked to end.
        """
        deadline = time.monotonic() + (_HURRY_SECONDS if hurry else _FLUSH_SECONDS)
        for sink in self._sinks.values():
            sink.flush(deadline)


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
