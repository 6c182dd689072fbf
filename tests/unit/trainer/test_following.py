"""A launcher that loses its hub, or is called by another one: whom it follows, and when.

L1, L2 and H4 are rules of the protocol; test_local_round.py has what a launcher does.
"""

from __future__ import annotations

import dataclasses
import selectors
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.calls import Calls
from ddpjob_trainer.launcher.hub.client import HubClient
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.listener import Listener
from ddpjob_trainer.launcher.hub.messages import (
    Call,
    Go,
    Hello,
    Message,
    Refused,
    Stopped,
    Welcome,
)
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from ddpjob_trainer.launcher.hub.wire import Wire
from support.launching import free_ports

PARKED = Hello(
    "uid", "pod-1", seat=1, birth=5, replicas=3, nproc=1, holds=True, running=False
)  # fmt: skip
RUNNING = dataclasses.replace(PARKED, running=True)


class Line:
    """A wire without a socket."""

    def __init__(self) -> None:
        self.received: Callable[[Message, float], None] = lambda message, now: None
        self.closed: Callable[[str, float], None] = lambda reason, now: None
        self.sent: list[Message] = []
        self.open = True

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.open = False


class Launcher:
    """A launcher's side of its link; where the hub should be, nobody listens."""

    def __init__(self, hello: Hello, least: int = 5) -> None:
        self.selector = selectors.DefaultSelector()
        self.said: list[str] = []
        [nobody] = free_ports(1)
        address = ("127.0.0.1", nobody)
        self.client = HubClient(address, hello, self.selector, self.said.append, least)

    def call(self, number: int, pod: str, uid: str = "uid") -> tuple[Line, Refused | None]:
        line: Any = Line()
        return line, self.client.called(line, Call(uid, number, pod), 0.0)

    def linked(self, number: int, pod: str) -> Line:
        """To a hub that has called, or that it has asked."""
        line: Any = Line()
        self.client._ask(line)
        line.received(Welcome(number, pod), 0.0)
        assert self.client.met
        return line


@pytest.fixture
def make() -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def one(*given: Any) -> Launcher:
        made.append(Launcher(*given))
        return made[-1]

    yield one
    for launcher in made:
        launcher.client.close()
        launcher.selector.close()


@pytest.mark.parametrize("by_call", [True, False])
@pytest.mark.parametrize(
    ("followed", "hub", "follows"),
    [
        (None, (5, "a"), True),
        (None, (4, "a"), False),  # it was made for a newer one
        (None, (9, "a"), True),
        ((6, "a"), (6, "a"), True),  # the link broke
        ((6, "a"), (6, "b"), False),
        ((6, "a"), (5, "b"), False),
        ((6, "a"), (7, "b"), True),
    ],
)
@pytest.mark.fault("T18")
def test_which_hub_a_launcher_follows(make, followed, hub, follows, by_call):  # type: ignore[no-untyped-def]
    """L1: whether it is called, or asks where the hub's name leads it."""
    launcher = make(PARKED)
    client = launcher.client
    if followed:
        client_line = launcher.linked(*followed)
        client_line.closed("it closed the connection", 0.0)
        assert client.lost == "it closed the connection"
        client.leave()
        client.join()
    if by_call:
        line, refused = launcher.call(*hub)
        assert (refused is None) is follows
        assert line.sent == ([PARKED] if follows else [])
        return
    line = Line()
    client._ask(line)
    line.received(Welcome(*hub), 0.0)
    client.send(Stopped(0, (), -1), 0.0)
    assert (line.open, len(line.sent)) == ((True, 2) if follows else (False, 1))


def test_a_call_takes_the_launcher_from_a_hub_that_still_answers(make):  # type: ignore[no-untyped-def]
    """L2: Hello comes when nothing runs here, and says so."""
    launcher = make(RUNNING)
    client = launcher.client
    old = launcher.linked(5, "old")
    new, refused = launcher.call(7, "new")
    assert (refused, new.sent, client.lost) == (None, [], "hub 7 has taken its place")
    client.leave()
    assert (old.open, new.open, client.lost) == (False, True, "")
    client.send(Stopped(0, (), -1), 0.0)  # nobody is to hear it
    _, refused = launcher.call(5, "old")
    assert refused is not None, "it is left for good"
    client.join()
    assert new.sent == [PARKED]
    new.received(Welcome(7, "new"), 1.0)
    client.send(Stopped(1, (), -1), 1.0)
    assert new.sent == [PARKED, Stopped(1, (), -1)]
    _, refused = launcher.call(7, "new")
    assert refused == Refused("this launcher is linked", final=False)
    _, refused = launcher.call(5, "old")
    assert refused == Refused("this launcher waits for hub 7 or a later one", final=True)


def test_a_call_before_the_first_hub_was_met(make):  # type: ignore[no-untyped-def]
    launcher = make(RUNNING)
    line, refused = launcher.call(6, "new")
    assert (refused, line.sent, launcher.client.met) == (None, [], True)
    assert launcher.client.lost
    launcher.client.leave()
    launcher.client.join()
    assert line.sent == [PARKED]


def test_who_asks_in_two_ways_keeps_the_first_that_admits_it(make):  # type: ignore[no-untyped-def]
    """The hub refuses the second as long as the first is linked."""
    launcher = make(PARKED)
    dialed: Any = Line()
    launcher.client._ask(dialed)
    called, _ = launcher.call(6, "new")
    assert dialed.sent == called.sent == [PARKED]
    called.received(Refused("replica 1 has been admitted before", final=False), 0.0)
    assert (dialed.open, called.open) == (True, False)
    dialed.received(Welcome(6, "new"), 0.0)
    dialed.received(Go(6, 0, 1, ()), 0.0)
    assert list(launcher.client.inbox) == [Go(6, 0, 1, ())]
    assert launcher.client.lost == ""


def test_what_is_no_call_is_refused(make):  # type: ignore[no-untyped-def]
    launcher = make(PARKED)
    _, refused = launcher.call(6, "new", uid="other")
    assert refused == Refused("this launcher belongs to another job", final=True)
    line: Any = Line()
    with pytest.raises(ValueError, match="must be Call"):
        launcher.client.called(line, PARKED, 0.0)
    launcher.client._ask(line)
    with pytest.raises(ValueError, match="must not say Go before Welcome"):
        line.received(Go(6, 0, 1, ()), 0.0)


def test_one_that_has_been_replaced_is_out(make):  # type: ignore[no-untyped-def]
    """H3, also over the link that it has."""
    launcher = make(RUNNING)
    line = launcher.linked(5, "hub")
    line.received(Refused("a newer pod has its place", final=True), 0.0)
    assert (launcher.client.lost, launcher.client.met) == ("a newer pod has its place", False)


@pytest.mark.fault("T18")
def test_a_new_hub_calls_until_all_are_linked() -> None:
    """H4."""
    selector = selectors.DefaultSelector()
    [nobody] = free_ports(1)
    linked: set[int] = {2}
    heard: list[Message] = []

    def answered(wire: Wire, message: Message, now: float) -> None:
        heard.append(message)

    where = {1: ("127.0.0.1", nobody), 2: ("127.0.0.1", nobody)}
    calls = Calls(where, Call("uid", 7, "new"), selector, linked.__contains__, answered)

    def turn(now: float) -> None:
        for key, _ in selector.select(5):
            key.data(now)

    assert calls.tick(0.0) == 0.5, "replica 2 needs none, for now"
    turn(0.1)
    due = calls.tick(0.2)
    assert due == 0.5
    linked.clear()
    calls.tick(0.7)
    turn(0.8)
    calls.close()
    selector.close()
    assert heard == []


@pytest.mark.fault("T18")
def test_a_new_hub_takes_a_launcher_from_one_still_answering_at_its_name() -> None:
    """Over sockets, with hubs of two."""
    selector = selectors.DefaultSelector()
    own = dataclasses.replace(RUNNING, replicas=2)
    went: list[Message] = []

    def serve(number: int, running: bool) -> tuple[Hub, HubServer, tuple[str, int]]:
        lead = dataclasses.replace(
            own, pod=f"hub-{number}", seat=0, birth=number, running=running
        )  # fmt: skip
        listening = sockets.bind(0)
        post: list[Callable[[int, Message], None]] = []
        hub = Hub(lead, Limits(3, hold=99.0), lambda *said: post[0](*said))  # noqa: PLW0108
        server = HubServer(listening, selector, hub, lambda said: None)
        post.append(lambda replica, m: server.post(replica, m) if replica else went.append(m))
        hub.admit(lead, 0.0)
        return hub, server, ("127.0.0.1", listening.getsockname()[1])

    def turn(until: Callable[[], object]) -> None:
        while not until():
            for key, _ in selector.select(5):
                key.data(1.0)
            calls.tick(1.0)

    old, old_server, name = serve(5, True)
    new, new_server, _ = serve(7, False)
    client = HubClient(name, own, selector, lambda text: None, least=5)
    door = sockets.bind(0)
    listener = Listener(door, selector, client.called)
    where = {1: ("127.0.0.1", door.getsockname()[1])}
    calls = Calls(where, Call("uid", 7, "hub-7"), selector, new.is_present, new_server.answered)
    turn(lambda: client.met and client.lost)
    client.leave()
    client.join()
    turn(lambda: new.is_present(1) and not old.is_present(1) and client.inbox)
    assert client.inbox[-1] == Go(7, 0, 1, ())
    for part in (client, calls, listener, old_server, new_server, selector):
        part.close()


def test_a_hello_names_the_replica_that_was_served_last(make):  # type: ignore[no-untyped-def]
    launcher = make(PARKED)
    launcher.linked(5, "hub").received(Go(5, 1, 2, ()), 1.0)
    launcher.client.leave()
    launcher.client.join()
    line: Any = Line()
    launcher.client._ask(line)
    assert line.sent == [dataclasses.replace(PARKED, held=2)]
