"""Link a launcher to the hub: in memory in launcher 0, over TCP elsewhere.

membership.py makes the link, the supervisor's loop sends through it and empties its inbox.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque

from ddpjob_trainer import trace
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Message, Refused, Welcome
from ddpjob_trainer.launcher.hub.wire import Wire

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


class LocalLink:
    """Links launcher 0 to its own hub. ``inbox``: the hub's messages."""

    lost = ""

    def __init__(self, inbox: deque[Message], hub: Hub) -> None:
        self.inbox = inbox
        self._hub = hub

    def send(self, message: Message, now: float) -> None:
        """Hand a message to the hub."""
        self._hub.receive(0, message, now)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class HubClient:
    """Connects until admitted; keeps messages until then.

    ``inbox``: the hub's messages. ``lost``: why no more can come, "" while they may.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Hello,
        selector: selectors.BaseSelector,
    ) -> None:
        self.inbox: deque[Message] = deque()
        self.lost = ""
        self._address = address
        self._hello = hello
        self._selector = selector
        self._wire: Wire | None = None
        self._admitted = False
        self._waiting: list[Message] = []
        self._dialed: socket.socket | None = None  # by the thread, not taken yet
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        selector.register(self._wake_r, selectors.EVENT_READ, self._take)
        self._closing = threading.Event()
        self._connect(0.0)

    def send(self, message: Message, now: float) -> None:
        """Send to the hub, or keep it until the hub admits this launcher."""
        if self._admitted and self._wire is not None:
            self._wire.send(message)
        else:
            self._waiting.append(message)

    def close(self) -> None:
        """Close the connection, and connect no more."""
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
                self._dialed = socket.create_connection(self._address, _CONNECT_SECONDS)
            except OSError:  # it, or the name, may come yet
                self._closing.wait(_PAUSE_SECONDS)
                continue
            with contextlib.suppress(OSError):
                os.write(self._wake_w, b"x")
            return

    def _take(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 64)
        connection, self._dialed = self._dialed, None
        if connection is not None:
            self._wire = Wire(connection, self._selector, self._received, self._closed)
            self._wire.send(self._hello)

    def _received(self, message: Message, now: float) -> None:
        if isinstance(message, Refused):
            if message.final:
                self.lost = message.reason
            elif self._wire is not None:
                self._wire.close()
                self._connect(_PAUSE_SECONDS)
        elif isinstance(message, Welcome):
            self._admitted = True
            trace.mark("admitted")
            for waiting in self._waiting:
                self.send(waiting, now)
            self._waiting.clear()
        else:
            self.inbox.append(message)

    def _closed(self, reason: str, now: float) -> None:
        if self._admitted:
            self.lost = reason
        else:
            self._connect(_PAUSE_SECONDS)


Link = LocalLink | HubClient
