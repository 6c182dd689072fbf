"""A hub's port in this process, for tests of who may speak there and how."""

from __future__ import annotations

import selectors
import socket

from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, LastLine
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from support.patience import PATIENCE


class Port:
    """Heard when the test says so. ``said``: to the log."""

    def __init__(self, own: Hello, selector: selectors.BaseSelector | None = None) -> None:
        self.said: list[str] = []
        self.selector = selector or selectors.DefaultSelector()
        listener = host.bind(0)
        self.address = ("127.0.0.1", listener.getsockname()[1])
        self.hub = Hub(own, Limits(3, hold=99.0), lambda *said: self.server.post(*said))  # noqa: PLW0108
        self.lines = LastLine(leads=True)
        self.server = HubServer(listener, self.selector, self.hub, self.said.append, self.lines)
        self.hub.admit(own, 0.0)

    def hear(self, now: float = 100.0) -> None:
        while ready := self.selector.select(0.05):
            for key, _ in ready:
                key.data(now)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def close(self) -> None:
        self.server.close()
        self.selector.close()
