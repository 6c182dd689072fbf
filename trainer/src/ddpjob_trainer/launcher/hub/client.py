"""Link a launcher to the hub: in memory in launcher 0, over TCP elsewhere.

membership.py makes the link, the supervisor's loop sends through it and empties its inbox.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ddpjob_trainer import trace
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Message, Refused, Welcome
from ddpjob_trainer.launcher.hub.wire import Wire

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


class Link(Protocol):
    """``inbox``: the hub's messages. ``lost``: why no more can come, "" while they may.

    ``unmet``: evidence that no hub is where it should be, "" while it may only be late.
    """

    inbox: deque[Message]
    lost: str
    unmet: str

    def send(self, message: Message, now: float) -> None:
        """Send a message to the hub."""

    def close(self) -> None:
        """Close the link."""


class LocalLink:
    """Links launcher 0 to its own hub."""

    def __init__(self) -> None:
        self.inbox: deque[Message] = deque()
        self.lost = self.unmet = ""
        self.hub: Hub | None = None

    def send(self, message: Message, now: float) -> None:
        """See Link."""
        assert self.hub is not None
        self.hub.receive(0, message, now)

    def close(self) -> None:
        """See Link."""


class HubClient:
    """Connects until admitted; keeps messages until then."""

    def __init__(
        self,
        address: tuple[str, int],
        hello: Hello,
        selector: selectors.BaseSelector,
        tell: Callable[[str], None],
    ) -> None:
        self.inbox: deque[Message] = deque()
        self.lost = self.unmet = ""
        self._tell = tell
        self._refusal = ""  # the last reason for not being admitted yet
        self._address = address
        self._where = f"{address[0]} port {address[1]}"
        self._hello = hello
        self._selector = selector
        self._wire: Wire | None = None
        self._admitted = False
        self._waiting: list[Message] = []
        self._connected: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        selector.register(self._wake_r, selectors.EVENT_READ, self._take)
        self._closing = threading.Event()
        self._connect(0.0)

    def send(self, message: Message, now: float) -> None:
        """See Link."""
        if self._admitted and self._wire is not None:
            self._wire.send(message)
        else:
            self._waiting.append(message)

    def close(self) -> None:
        """See Link."""
        self._closing.set()
        if self._wire is not None:
            self._wire.close()

    def _connect(self, pause: float) -> None:
        """Connect in a thread, since the resolver may block for long."""
        threading.Thread(target=self._dial, args=(pause,), name="hub", daemon=True).start()

    def _dial(self, pause: float) -> None:
        self._closing.wait(pause)
        while not self._closing.is_set():
            try:
                self._connected.put(socket.create_connection(self._address, _CONNECT_SECONDS))
            except OSError as error:
                # A timeout, or an unknown name, proves nothing.
                refused = isinstance(error, ConnectionRefusedError)
                self.unmet = f"nobody listens at {self._where}" if refused else ""
                self._closing.wait(_PAUSE_SECONDS)
                continue
            with contextlib.suppress(OSError):
                os.write(self._wake_w, b"x")
            return

    def _take(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 64)
        with contextlib.suppress(queue.Empty):
            connection = self._connected.get_nowait()
            self._wire = Wire(connection, self._selector, self._received, self._closed)
            self._wire.send(self._hello)

    def _received(self, message: Message, now: float) -> None:
        if isinstance(message, Refused):
            if message.reason != self._refusal and not message.final:  # else twice a second
                self._tell(f"the hub does not admit this launcher yet: {message.reason[:200]}")
            self._refusal = self.unmet = message.reason
            if message.final:
                self.lost = message.reason
            elif self._wire is not None:
                self._wire.close()
                self._connect(_PAUSE_SECONDS)
        elif isinstance(message, Welcome):
            self._admitted = True
            trace.mark("admitted")
            self.unmet = ""
            for waiting in self._waiting:
                self.send(waiting, now)
            self._waiting.clear()
        else:
            self.inbox.append(message)

    def _closed(self, reason: str, now: float) -> None:
        if self._admitted:
            self.lost = reason
        else:
            self.unmet = f"what listens at {self._where} is no hub of this job: {reason}"
            self._connect(_PAUSE_SECONDS)
