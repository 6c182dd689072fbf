"""Collect the launcher's signals while it watches; obey them at once at its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

ENDING: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_FORWARDED: Final = ENDING | {signal.SIGUSR1, signal.SIGUSR2}


class Signals:
    """``pending``: signals not handled yet, oldest first."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    @contextlib.contextmanager
    def collected(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Collect signals and children's ends, and wake the selector for each.

        Afterwards signals are still collected, without effect until `end_at_once`. A signal ignored
        under nohup, or by a shell at `&`, ends neither the launcher nor the workers.
        """
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def received(signum: int, frame: FrameType | None) -> None:
            if signum != signal.SIGCHLD:
                self.pending.append(signum)

        def drain(now: float) -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(read, 4096)

        selector.register(read, selectors.EVENT_READ, drain)
        for signum in _FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, received)
        old = signal.signal(signal.SIGCHLD, received)
        old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            signal.signal(signal.SIGCHLD, old)
            os.close(read)
            os.close(write)

    def end_at_once(self, code: int) -> bool:
        """Make signals end the process with ``code``; return whether one is pending."""
        for signum in ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda *_: os._exit(code))
        return not ENDING.isdisjoint(self.pending)
