"""Which hub a launcher follows: it asks where the hub's name leads, and another hub may call it.

L1, L2 and H4 are rules of the protocol; test_local_round.py has what a launcher does meanwhile.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.hub.membership import HubClient
from ddpjob_trainer.launcher.hub.messages import (
    Call,
    Go,
    Hello,
    Message,
    Refused,
    Stopped,
    Welcome,
    decode,
    encode,
)
from ddpjob_trainer.launcher.hub.server import Calls, Listener
from support.hub_port import Port
from support.launching import free_ports
from support.patience import PATIENCE

PARKED = Hello(
    "uid", "pod-1", seat=1, birth=5, replicas=3, nproc=1, holds=True, running=False
)  # fmt: skip
RUNNING = replace(PARKED, running=True)
STOPPED = Stopped(0, (), -1)


class Peer:
    """The test's end of a connection with a launcher."""

    def __init__(self, launcher: Launcher, connection: socket.socket) -> None:
        self._launcher, self._connection = launcher, connection
        connection.setblocking(False)
        self.open = True

    def says(self, *messages: Message) -> None:
        self._connection.sendall(b"".join(map(encode, messages)))
        self._launcher.turn()

    def heard(self) -> list[Message]:
        """Since the last call."""
        self._launcher.turn()
        data = b""
        while self.open:
            try:
                piece = self._connection.recv(4096)
            except BlockingIOError:
                break
            data, self.open = data + piece, bool(piece)
        return [decode(line) for line in data.splitlines()]

    def close(self) -> None:
        self._connection.close()
        self._launcher.turn()


class Launcher:
    """A launcher's link, with its door for calls. ``named``: a hub listens at the hub's name."""

    def __init__(self, hello: Hello, *, least: int = 5, named: bool = True) -> None:
        self.selector = selectors.DefaultSelector()
        self._name, door = host.bind(0), host.bind(0)
        if named:
            self._name.listen()
            self._name.settimeout(PATIENCE)
        address, self._door = (("127.0.0.1", one.getsockname()[1]) for one in (self._name, door))
        self.client = HubClient(address, hello, self.selector, lambda said: None, least)
        self._listener = Listener(door, self.selector, self.client.called)

    def turn(self) -> None:
        while ready := self.selector.select(0.02):
            for key, _ in ready:
                key.data(1.0)

    def asks(self) -> Peer:
        """The hub at the name, which gets a Hello."""
        peer = Peer(self, self._name.accept()[0])
        while peer.open and not (heard := peer.heard()):
            pass
        self.hello = heard[0]
        return peer

    def calls(self, first: Message) -> Peer:
        """Somebody at the launcher's door."""
        peer = Peer(self, socket.create_connection(self._door, PATIENCE))
        peer.says(first)
        return peer

    def linked(self, number: int, pod: str) -> Peer:
        hub = self.asks()
        hub.says(Welcome(number, pod))
        assert self.client.linked
        return hub

    def close(self) -> None:
        for part in (self.client, self._listener, self._name, self.selector):
            part.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Launcher]]:
    with ExitStack() as made:

        def one(hello: Hello, *, named: bool = True) -> Launcher:
            launcher = Launcher(hello, named=named)
            made.callback(launcher.close)
            return launcher

        yield one


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
def test_which_hub_a_launcher_follows(make, followed, hub, follows, by_call):
    """L1: whether it is called, or asks where the hub's name leads it."""
    launcher = make(PARKED, named=not by_call or followed is not None)
    client = launcher.client
    if followed:
        launcher.linked(*followed).close()
        assert client.lost == "it closed the connection"
        client.leave()
        client.join()
    if by_call:
        peer = launcher.calls(Call("uid", *hub))
        assert (peer.heard() == [PARKED]) is follows
        return
    peer = launcher.asks()
    peer.says(Welcome(*hub))
    client.send(STOPPED, 1.0)
    assert (peer.heard(), peer.open) == (([STOPPED], True) if follows else ([], False))


def test_a_call_takes_a_launcher_from_a_hub_that_still_answers(make):
    """L2: Hello comes when nothing runs here, and says so."""
    launcher = make(RUNNING)
    client = launcher.client
    old = launcher.linked(5, "old")
    new = launcher.calls(Call("uid", 7, "new"))
    assert (new.heard(), client.lost) == ([], "hub 7 has taken its place")
    client.leave()
    assert (old.heard(), old.open, client.lost) == ([], False, "")
    client.send(STOPPED, 1.0)  # nobody is to hear it
    [refused] = launcher.calls(Call("uid", 5, "old")).heard()
    assert isinstance(refused, Refused), "it is left for good"
    client.join()
    assert (new.heard(), new.open) == ([PARKED], True)
    new.says(Welcome(7, "new"))
    client.send(STOPPED, 1.0)
    assert new.heard() == [STOPPED]
    again = [launcher.calls(Call("uid", *hub)).heard() for hub in ((7, "new"), (5, "old"))]
    assert again == [
        [Refused("this launcher is linked", final=False)],
        [Refused("this launcher waits for hub 7 or a later one", final=True)],
    ]


def test_a_call_may_come_before_the_first_hub_was_met(make):
    launcher = make(RUNNING, named=False)
    new = launcher.calls(Call("uid", 6, "new"))
    assert (new.heard(), launcher.client.met) == ([], True)
    assert launcher.client.lost
    launcher.client.leave()
    launcher.client.join()
    assert new.heard() == [PARKED]


def test_who_asks_in_two_ways_keeps_the_first_that_admits_it(make):
    """The hub refuses the second as long as the first is linked."""
    launcher = make(PARKED)
    dialed = launcher.asks()
    called = launcher.calls(Call("uid", 6, "new"))
    assert [launcher.hello, *called.heard()] == [PARKED, PARKED]
    called.says(Refused("replica 1 has been admitted before", final=False))
    assert (called.heard(), called.open) == ([], False)
    dialed.says(Welcome(6, "new"), Go(6, 0, 1, ()))
    assert list(launcher.client.inbox) == [Go(6, 0, 1, ())]
    assert launcher.client.lost == ""


def test_what_is_no_call_is_refused(make):
    launcher = make(PARKED)
    other = launcher.calls(Call("other", 6, "new"))
    assert other.heard() == [Refused("this launcher belongs to another job", final=True)]
    for peer in (launcher.calls(PARKED), launcher.asks()):
        peer.says(Go(6, 0, 1, ()))  # before Welcome, or where Call must come first
        assert (peer.heard(), peer.open) == ([], False)


def test_one_that_has_been_replaced_is_out(make):
    """H3, also over the link that it has."""
    launcher = make(RUNNING)
    launcher.linked(5, "hub").says(Refused("a newer pod has its place", final=True))
    assert (launcher.client.lost, launcher.client.met) == ("a newer pod has its place", False)


def test_a_hello_names_the_replica_that_was_served_last(make):
    launcher = make(PARKED)
    launcher.linked(5, "hub").says(Go(5, 1, 2, ()))
    launcher.client.leave()
    launcher.client.join()
    launcher.asks()
    assert launcher.hello == replace(PARKED, held=2)


# --- The calls of a new hub (H4) ---------------------------------------------------------------


@pytest.mark.fault("T18")
def test_a_new_hub_calls_until_all_are_linked():
    selector = selectors.DefaultSelector()
    [nobody] = free_ports(1)
    linked, heard = {2}, list[Message]()
    where = dict.fromkeys((1, 2), ("127.0.0.1", nobody))
    calls = Calls(
        where, Call("uid", 7, "new"), selector, linked.__contains__,
        lambda wire, message, now: heard.append(message),
    )  # fmt: skip

    def turn(now: float) -> None:
        for key, _ in selector.select(5):
            key.data(now)

    assert calls.tick(0.0) == 0.5, "replica 2 needs none, for now"
    turn(0.1)
    assert calls.tick(0.2) == 0.5
    linked.clear()
    calls.tick(0.7)
    turn(0.8)
    calls.close()
    selector.close()
    assert heard == []


@pytest.mark.fault("T18")
def test_a_new_hub_takes_a_launcher_from_the_one_at_its_name():
    """With two hubs, each with one launcher more."""
    own = replace(RUNNING, replicas=2)
    lead = replace(own, seat=0, pod="hub-5")
    old = Port(lead)
    new = Port(replace(lead, pod="hub-7", birth=7, running=False), old.selector)
    client = HubClient(old.address, own, old.selector, lambda said: None, least=5)
    door = host.bind(0)
    listener = Listener(door, old.selector, client.called)
    where = {1: ("127.0.0.1", door.getsockname()[1])}
    call = Call("uid", 7, "hub-7")
    calls = Calls(where, call, old.selector, new.hub.is_present, new.server.answered)

    def turn(until: Callable[[], object]) -> None:
        while not until():
            for key, _ in old.selector.select(5):
                key.data(1.0)
            calls.tick(1.0)

    turn(lambda: client.met and client.lost)
    client.leave()
    client.join()
    turn(lambda: new.hub.is_present(1) and not old.hub.is_present(1) and client.inbox)
    assert client.inbox[-1] == Go(7, 0, 1, ())
    for part in (client, calls, listener, new.server, old):
        part.close()
