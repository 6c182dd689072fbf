"""The hub's port: strangers cannot keep a launcher of the gang out."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.client import HubClient
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Welcome, encode
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer

GANG = Hello("uid", 1, replicas=2, nproc=1, replica=0)

pytestmark = pytest.mark.timeout(60)


def test_silent_strangers_make_room_for_a_launcher():  # type: ignore[no-untyped-def]
    selector = selectors.DefaultSelector()
    listener = sockets.bind(0, host="127.0.0.1")
    port = listener.getsockname()[1]
    post: list[Callable[..., None]] = []
    hub = Hub(GANG, Limits(3), lambda *said: post[0](*said))  # noqa: PLW0108  post is filled later
    server = HubServer(listener, selector, hub)
    post.append(server.post)

    def hear(now: float) -> None:
        while ready := selector.select(0.05):
            for key, _ in ready:
                key.data(now)

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=10)

    strangers = [connect() for _ in range(64)]
    hear(100.0)
    early = connect()
    hear(100.1)
    assert early.recv(1) == b""  # so soon after the others
    launcher = connect()
    launcher.sendall(encode(Hello("uid", 1, replicas=2, nproc=1, replica=1)))
    hear(101.0)
    assert launcher.recv(1000) == encode(Welcome())
    assert strangers[0].recv(1) == b""
    for one in (*strangers, early, launcher):
        one.close()
    server.close()


def test_who_is_not_admitted_says_why_and_once():  # type: ignore[no-untyped-def]
    selector = selectors.DefaultSelector()
    listener = sockets.bind(0, host="127.0.0.1")
    address = listener.getsockname()
    post: list[Callable[..., None]] = []
    hub = Hub(GANG, Limits(3), lambda *said: post[0](*said))  # noqa: PLW0108  post is filled later
    server = HubServer(listener, selector, hub)
    post.append(server.post)
    assert hub.admit(replace(GANG, replica=1)) is None
    said: list[str] = []
    client = HubClient(address, replace(GANG, replica=1), selector, said.append)
    meetings = 0
    while meetings < 3:  # then it has heard the second refusal
        for key, _ in selector.select():
            meetings += key.data == client._take
            key.data(100.0)
    client.close()
    server.close()
    why = "replica 1 has been admitted before"
    assert said == [f"the hub does not admit this launcher yet: {why}"]
