"""Workers' output: passed through, line by line with a prefix where useful, the tail kept.

One thread reads all pipes, so a log reader that stands still never stops the supervisor.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

TAIL_LINES = 20
_LINE_END = re.compile(rb"(\r?\n|\r)")
_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
_MAX_LINE = 64 * 1024  # a longer line is passed on in pieces


@dataclass(slots=True)
class _Stream:
    target: int
    prefix: bytes
    tail: deque[str]
    rest: bytes = b""


@dataclass(slots=True)
class _Worker:
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    streams: int = 0


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody made our output non-blocking, and its reader is slow
            select.select([], [fd], [])
        except OSError:
            return  # nobody reads our output any more; training goes on


class OutputPump:
    """Owns the reading ends of all workers' pipes."""

    def __init__(self, *, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._streams = 0
        self._changed = threading.Condition()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def pipes(self, rank: int) -> tuple[int, int]:
        """Return writing ends for a new worker's stdout and stderr; its tail begins anew."""
        prefix = f"[rank {rank}] ".encode() if self._prefixed else b""
        worker = _Worker()
        ends = []
        with self._changed:
            self._workers[rank] = worker
            for target in (1, 2):
                read, write = os.pipe2(os.O_CLOEXEC)
                ends.append(write)
                worker.streams += 1
                self._streams += 1
                self._selector.register(
                    read, selectors.EVENT_READ, (worker, _Stream(target, prefix, worker.tail))
                )
        os.write(self._wake_w, b"x")
        return ends[0], ends[1]

    def tail(self, rank: int) -> list[str]:
        """Last lines of a worker, oldest first."""
        with self._changed:
            worker = self._workers.get(rank)
            return list(worker.tail) if worker else []

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Append to the tail what the launcher says of a worker."""
        with self._changed:
            if rank in self._workers:
                self._workers[rank].tail.extend(lines)

    def drain(self, timeout: float, rank: int | None = None) -> bool:
        """Wait until every pipe, or those of a rank, ended; False when a stray holds one."""
        with self._changed:
            worker = self._workers.get(rank) if rank is not None else None
            return self._changed.wait_for(
                lambda: (worker.streams if worker else self._streams) == 0, timeout
            )

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_r, 4096)
                    continue
                worker, stream = key.data
                data = os.read(key.fd, 65536)
                self._pass_on(stream, data)
                if not data:
                    with self._changed:
                        self._selector.unregister(key.fd)
                        os.close(key.fd)
                        worker.streams -= 1
                        self._streams -= 1
                        self._changed.notify_all()

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        # A progress bar ends its lines with a carriage return.
        *lines, stream.rest = _LINE_END.split(stream.rest + data)
        if stream.rest and (not data or len(stream.rest) > _MAX_LINE):
            lines += [stream.rest, b"\n"]
            stream.rest = b""
        pairs = list(zip(lines[::2], lines[1::2], strict=True))
        with self._changed:
            stream.tail.extend(
                line[:1000].decode(errors="replace").rstrip() for line, _ in pairs if line.strip()
            )
        if stream.prefix:
            data = b"".join(stream.prefix + line + end for line, end in pairs)
        _write(stream.target, data)


def exception_in(lines: Sequence[str]) -> str:
    """Find the last exception of a Python traceback in a program's output, "" if none."""
    found = ""
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and not line.startswith(" ") and _EXCEPTION_LINE.match(line):
            found, inside = line, False
    return found


def stdout_is_terminal() -> bool:
    """Whether a person watches."""
    return sys.stdout.isatty()
