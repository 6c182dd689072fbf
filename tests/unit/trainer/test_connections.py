"""Connections with the gang's pods, as the kernel's tables show them.

In those of this machine each pod is a loopback address. Others have connections there, too, so what
is said where there is none is tested by rows.
"""

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.host import Connections

#: New in each run: what closes stays in the tables for a minute.
OTHER, STRANGER, AGAIN = (
    f"127.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    for number in random.SystemRandom().sample(range(1 << 16, 255 << 16), 3)
)


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


def met(found: Connections, begin: int, seconds: int, *, trains: bool = True) -> bool | None:
    for now in range(begin, begin + seconds):
        found.look(float(now), lambda now=now: trains and now)  # type: ignore[misc]
        found.look(now + 0.5, lambda: pytest.fail("within a second it costs nothing"))
    return found.met


HUB, METRICS, HERE = 20, 21, "h"
GANG = [(HERE, HUB, "a", 50), (HERE, HUB, "b", 50)]


@pytest.fixture
def rows(monkeypatch) -> list[tuple[str, int, str, int]]:  # type: ignore[no-untyped-def]
    found = [*GANG, (HERE, METRICS, "operator", 9), (HERE, 40, HERE, 41), (HERE, 41, HERE, 40)]
    monkeypatch.setattr(host, "_connections", lambda: iter(found))
    return found


def test_a_minute_of_steps_without_a_connection_shows_it(rows):
    found = Connections(HUB, METRICS)
    assert met(found, 100, 600, trains=False) is None, "it may read its data"
    assert met(found, 700, 60) is None
    assert met(found, 760, 1) is False
    rows.append((HERE, 77, "a", 50))
    assert met(found, 800, 1) is True
    found.begin()
    assert found.met is None


def test_without_other_pods_nobody_can_know(rows):
    rows.clear()
    assert met(Connections(HUB, METRICS), 100, 200) is None
    assert met(Connections(None, METRICS), 100, 200) is None


def test_a_program_that_trains_may_have_met_on_another_network(rows):
    """An address that no link shows: of a second interface, or the other family."""
    found = Connections(HUB, METRICS)
    rows.append((HERE, 60, "data", 443))
    assert met(found, 100, 100, trains=False) is None
    rows.pop()
    assert met(found, 200, 100) is False, "it only fetched its data"
    rows.append((HERE, 60, "a on eth1", 443))
    assert met(found, 300, 1) is None
    rows.pop()
    assert met(found, 400, 100) is None


def test_a_connection_that_was_is_remembered(pods):
    """Also one that began and closed since the last look, which the launcher's end is for."""
    hub, store = listen(pods), listen(pods)
    found = Connections(hub.getsockname()[1], None)
    connect(pods, AGAIN, hub)
    found.look(100.0, lambda: 0)
    assert not found.met
    with contextlib.ExitStack() as program:
        connect(program, AGAIN, store)
    found.look(100.1, lambda: 0, last=True)
    assert found.met is True


def test_links_of_launchers_and_strangers_are_none_of_the_programs(pods):
    hub, store = listen(pods), listen(pods)
    found = Connections(hub.getsockname()[1], None)
    connect(pods, OTHER, hub)
    connect(pods, STRANGER, store)
    connect(pods, "127.0.0.1", store)
    assert not met(found, 100, 100)
