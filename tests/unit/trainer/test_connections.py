"""Connections with the gang's pods, in the kernel's own tables: each pod is a loopback address."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.host import Connections

OTHER, STRANGER = "127.77.0.2", "127.77.0.3"


@pytest.fixture
def pods() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def listen(pods: contextlib.ExitStack) -> socket.socket:
    """As the hub does: on IPv4 and IPv6 at once."""
    found = pods.enter_context(host.bind(0))
    found.listen()
    return found


def connect(pods: contextlib.ExitStack, whence: str, to: socket.socket) -> None:
    address = ("127.0.0.1", to.getsockname()[1])
    pods.enter_context(socket.create_connection(address, source_address=(whence, 0)))
    pods.enter_context(to.accept()[0])


def met(found: Connections, begin: int, seconds: int = 12) -> bool | None:
    for now in range(begin, begin + seconds):
        found.look(float(now))
        found.look(now + 0.5)  # within a second it costs nothing
    return found.met


def test_a_link_to_the_hub_is_none_of_the_programs(pods):
    hub, store = listen(pods), listen(pods)
    found = Connections(hub.getsockname()[1])
    assert met(found, 100) is None, "no other pod is here yet"
    connect(pods, OTHER, hub)
    connect(pods, STRANGER, store)
    connect(pods, "127.0.0.1", store)
    assert met(found, 200, host._LOOKS - 1) is None, "it may be about to"
    assert met(found, 300) is False
    connect(pods, OTHER, store)
    assert met(found, 400, 1) is True


def test_a_connection_that_was_is_remembered(pods):
    hub, store = listen(pods), listen(pods)
    found = Connections(hub.getsockname()[1])
    connect(pods, OTHER, hub)
    with contextlib.ExitStack() as program:
        connect(program, OTHER, store)
        assert met(found, 100, 1) is True
    assert met(found, 200) is True


def test_without_a_hub_nobody_can_know():
    assert met(Connections(None), 100) is None
