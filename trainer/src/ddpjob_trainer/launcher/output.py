"""Print what workers write, line by line, and keep the last lines; write logs from threads.

A stalled reader or a dead volume blocks only the thread that writes to it. Workers wait while there
is no room, as they would at the pipe itself. The supervisor never does: its lines beyond a bound
are dropped, and their number is printed when there is room again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ddpjob_contract.text import clean, without_credentials
from ddpjob_trainer.telemetry.event_log import EventLog
from ddpjob_trainer.tracebacks import Tracebacks, uncoloured

# --- Standard output and error --------------------------------------------------------------------

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
        """Wait until all is written, not long for a reader that stalls, less in a ``hurry``."""
        deadline = time.monotonic() + (_HURRY_SECONDS if hurry else _FLUSH_SECONDS)
        for sink in self._sinks.values():
            sink.flush(deadline)


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


# --- The event log --------------------------------------------------------------------------------

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


# --- Workers' output ------------------------------------------------------------------------------

TAIL_LINES = 20  # of the termination report
KEPT_LINES = 200  # for evidence
_LINE_END = re.compile(rb"(\r?\n|\r)")
_MAX_LINE = 64 * 1024  # a longer line is passed on in pieces
_READ = 64 * 1024
_FRESH_LINES = 200  # those before are not looked at: a program may print faster than anybody reads
_PIPE_BYTES = 1024 * 1024  # the largest pipe, unless root allowed more


@dataclass(slots=True)
class _Stream:
    fd: int  # -1: closed
    target: int
    prefix: bytes
    tail: deque[str]
    first: bool  # of rank 0
    rest: bytes = b""
    tracebacks: Tracebacks = field(default_factory=Tracebacks)


class OutputPump:
    """Owns the reading ends of all workers' pipes."""

    def __init__(
        self, log: Log, *, prefixed: bool, whose: str = "rank ", secret_url: str = ""
    ) -> None:
        """Create it; ``secret_url``: its password is shown in no report and no evidence.

        ``wrote``: when a worker last wrote anything.
        """
        self.wrote = 0.0
        self._log, self._url = log, secret_url
        self._prefixed, self._whose = prefixed, whose
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, list[_Stream]] = {}  # of each worker
        self._fresh: deque[str] = deque(maxlen=_FRESH_LINES)  # of rank 0
        self._lock = threading.Lock()  # never held while anything blocks
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def pipes(self, rank: int) -> tuple[int, int]:
        """Return a new worker's ends for stdout and stderr; clear its tail. Raises OSError."""
        prefix = f"[{self._whose}{rank}] ".encode() if self._prefixed else b""
        tail: deque[str] = deque(maxlen=KEPT_LINES)
        ends: list[int] = []
        with self._lock:
            streams = self._streams[rank] = []
            if rank == 0:
                self._fresh.clear()
            for target in (1, 2):
                try:
                    read, write = os.pipe2(os.O_CLOEXEC)
                except OSError:
                    for end in ends:
                        os.close(end)
                    raise
                os.set_blocking(read, False)
                ends.append(write)
                stream = _Stream(read, target, prefix, tail, first=rank == 0)
                streams.append(stream)
                self._selector.register(read, selectors.EVENT_READ, stream)
        with contextlib.suppress(BlockingIOError):  # it is awake then
            os.write(self._wake_w, b"x")
        return ends[0], ends[1]

    def tail(self, rank: int, most: int = TAIL_LINES) -> list[str]:
        """Return the last lines of a worker, oldest first."""
        with self._lock:
            streams = self._streams.get(rank)
            lines = list(streams[0].tail)[-most:] if streams else []
        # At once: a restart waits for it, and each call looks for all spellings of the URL.
        return without_credentials("\n".join(lines), self._url).split("\n") if lines else []

    def fresh(self) -> list[str]:
        """Return the lines of rank 0 since the last call, the newest."""
        with self._lock:
            lines = list(self._fresh)
            self._fresh.clear()
        return lines

    def exception(self, rank: int, *, crashed: bool = False) -> str:
        """Return a worker's last exception, or, if it ``crashed``, its fatal error; "" if none."""
        with self._lock:
            words = (one.fatal if crashed else one.exception for one in self._tracebacks(rank))
            return without_credentials(next(filter(None, words), ""), self._url)

    def raised_in(self, rank: int) -> str:
        """Return the file in which a worker's last exception was raised, "" if none is known."""
        with self._lock:
            return next((one.raised_in for one in self._tracebacks(rank) if one.exception), "")

    def _tracebacks(self, rank: int) -> list[Tracebacks]:
        return [stream.tracebacks for stream in self._streams.get(rank, [])[::-1]]

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Append lines about a worker to its tail."""
        with self._lock:
            for stream in self._streams.get(rank, [])[:1]:
                stream.tail.extend(lines)

    def collect(self, rank: int) -> None:
        """Read an ended worker's remaining output, without waiting for any writer.

        A stray child that still holds a pipe is read on as before.
        """
        with self._lock:
            for stream in self._streams.get(rank, []):
                for _ in range(_PIPE_BYTES // _READ):
                    if not self._take(stream):
                        break
                self._pass_on(stream, b"")  # also a last line without its end

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                stream = key.data
                if stream is None:
                    os.read(self._wake_r, 4096)
                    continue
                self._log.wait_for_room(stream.target)
                with self._lock:
                    self._take(stream)

    def _take(self, stream: _Stream) -> bool:
        """Read once; return whether there may be more."""
        if stream.fd < 0:
            return False
        try:
            data = os.read(stream.fd, _READ)
        except BlockingIOError:
            return False
        self._pass_on(stream, data)
        if data:
            self.wrote = time.monotonic()
        else:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            stream.fd = -1
        return bool(data)

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        # A progress bar ends its lines with a carriage return.
        *lines, stream.rest = _LINE_END.split(stream.rest + data)
        if stream.rest and (not data or len(stream.rest) > _MAX_LINE):
            lines += [stream.rest, b"\n"]
            stream.rest = b""
        pairs = list(zip(lines[::2], lines[1::2], strict=True))
        texts = (line[:1000].decode(errors="replace") for line, _ in pairs)
        for line in (uncoloured(text).rstrip() for text in texts):
            stream.tracebacks.feed(line)
            if line:
                stream.tail.append(line)
                if stream.first:
                    self._fresh.append(line)
        if stream.prefix:
            data = b"".join(stream.prefix + line + end for line, end in pairs)
        self._log.put(stream.target, data)
