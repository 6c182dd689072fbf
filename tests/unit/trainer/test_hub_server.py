"""The hub's port: strangers cannot keep a launcher of the gang out."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Welcome, encode
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from support.patience import PATIENCE


def hello(uid: str, replica: int = 1) -> Hello:
    return Hello(uid, 1, replicas=2, nproc=1, replica=replica)


def test_strangers_are_dropped_unless_they_are_admitted() -> None:
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    post: list[Callable[..., None]] = []
    hub = Hub(hello("uid", 0), Limits(3), lambda *said: post[0](*said))  # noqa: PLW0108  filled later
    server = HubServer(listener, selector, hub)
    post.append(server.post)
    three = [socket.create_connection(address, timeout=PATIENCE) for _ in range(3)]
    silent, refused, launcher = three
    refused.sendall(encode(hello("another's")))
    launcher.sendall(encode(hello("uid")))
    while ready := selector.select(0.05):
        for key, _ in ready:
            key.data(100.0)
    assert launcher.recv(1000) == encode(Welcome())
    assert b"belongs to another job" in refused.recv(1000)
    assert refused.recv(1) == b""
    due = server.tick(100.0)
    assert due is not None
    server.tick(due)
    assert silent.recv(1) == b""
    server.close()
    selector.close()
    for one in three:
        one.close()
