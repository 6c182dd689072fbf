"""The hub's port: strangers cannot keep a launcher of the gang out."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator

import pytest

from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Welcome, encode
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from support.patience import PATIENCE

GANG = Hello("uid", 1, replicas=2, nproc=1, replica=0)


class Port:
    """A hub's port, heard when the test says so."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        post: list[Callable[..., None]] = []
        self.hub = Hub(GANG, Limits(3), lambda *said: post[0](*said))  # noqa: PLW0108  filled later
        self.server = HubServer(listener, self.selector, self.hub)
        post.append(self.server.post)

    def hear(self, now: float) -> None:
        while ready := self.selector.select(0.05):
            for key, _ in ready:
                key.data(now)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def close(self) -> None:
        self.server.close()
        self.selector.close()


@pytest.fixture
def port() -> Iterator[Port]:
    found = Port()
    yield found
    found.close()


def hello(uid: str = "uid") -> bytes:
    return encode(Hello(uid, 1, replicas=2, nproc=1, replica=1))


def test_strangers_are_dropped_unless_they_are_admitted(port: Port) -> None:
    silent, refused, launcher = (port.connect() for _ in range(3))
    refused.sendall(hello("another's"))
    launcher.sendall(hello())
    port.hear(100.0)
    assert launcher.recv(1000) == encode(Welcome())
    assert b"belongs to another job" in refused.recv(1000)
    assert refused.recv(1) == b""
    due = port.server.tick(100.0)
    assert due is not None
    port.server.tick(due)
    assert silent.recv(1) == b""
    for one in (silent, refused, launcher):
        one.close()
