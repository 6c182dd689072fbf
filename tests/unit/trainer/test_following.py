"""A launcher that loses its hub, or is called by another one: whom it follows, and when.

L1 to L4 are rules of the protocol; tests/unit/trainer/test_hub_replacing.py has the hub's side.
"""

from __future__ import annotations

import dataclasses
import selectors
from collections import deque
from collections.abc import Callable, Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.calls import Calls
from ddpjob_trainer.launcher.hub.client import HubClient
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.listener import Listener
from ddpjob_trainer.launcher.hub.messages import (
    Call,
    End,
    Finished,
    Go,
    Hello,
    Message,
    Refused,
    Stop,
    Stopped,
    Welcome,
)
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from ddpjob_trainer.launcher.hub.wire import Wire
from ddpjob_trainer.launcher.reports.account import Account
from ddpjob_trainer.launcher.reports.termination import Ended
from ddpjob_trainer.launcher.supervisor import Supervisor, _Phase
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


# --- The launcher's states -----------------------------------------------------------------------


class Scene:
    """A supervisor without processes, and what it did."""

    def __init__(self, phase: _Phase, *, holds: bool = True, met: bool = True) -> None:
        self.did: list[str] = []
        self.link = SimpleNamespace(
            inbox=deque[Message](), lost="", unmet="", met=met, linked=False,
            leave=lambda: self.did.append("leave"), join=lambda: self.did.append("join"),
            send=lambda message, now: self.did.append(type(message).__name__),
        )  # fmt: skip
        self.workers = SimpleNamespace(
            key=Key(5, 2), round=2, exits=[], stopping=False, kill_at=None, failed=False,
            stop=lambda now, last_words: self.did.append(f"stop {last_words:g}"),
            kill_by=lambda moment: self.did.append("grace"), is_training=lambda: True,
            is_gone=lambda spared: True, snapshot_step=lambda: 7, state=lambda rank: None,
        )  # fmt: skip
        config = SimpleNamespace(holds=holds, hold_seconds=330.0, exit_seconds=10.0, env=None)
        config.env = SimpleNamespace(grace_seconds=30.0, standby=0)
        self.supervisor = supervisor = object.__new__(Supervisor)
        bare: Any = supervisor
        bare._config, bare._workers, bare._ended = config, self.workers, Ended()
        bare._member = SimpleNamespace(link=self.link, rounds=True, hub=None)
        bare._log = SimpleNamespace(say=lambda text: None)
        bare._phase, bare._since, bare._finished = phase, 100.0, False
        bare._linked_at = 0.0
        bare._account = Account(100.0)
        bare._evidence = SimpleNamespace(why="", begin=lambda *_: None)
        bare._next_round = lambda go, now: self.did.append(f"round {go.round}")

    def take(self, *messages: Message, lost: str = "", now: float = 101.0) -> _Phase:
        self.link.inbox.extend(messages)
        self.link.lost = lost
        self.supervisor._take_messages(now)
        return self.supervisor._phase


GO = Go(5, 3, 1, ())


@pytest.mark.parametrize(
    ("phase", "messages", "lost", "then", "did"),
    [
        (_Phase.RUNNING, [Stop(2)], "", _Phase.STOPPING, ["stop 0"]),
        (_Phase.RUNNING, [Stop(2, graceful=True)], "", _Phase.STOPPING, ["grace"]),
        (_Phase.RUNNING, [Stop(1)], "", _Phase.RUNNING, []),
        (_Phase.SUCCEEDED, [Stop(2)], "", _Phase.STOPPING, ["stop 0"]),
        # L3, also where Stop and the loss cross.
        (_Phase.RUNNING, [], "gone", _Phase.STOPPING, ["leave", "stop 0"]),
        (_Phase.RUNNING, [Stop(2)], "gone", _Phase.STOPPING, ["stop 0", "leave"]),
        (_Phase.RUNNING, [Stop(2, graceful=True)], "gone", _Phase.STOPPING, ["grace", "leave"]),
        (_Phase.STOPPING, [], "gone", _Phase.STOPPING, ["leave"]),
        (_Phase.PARKED, [], "gone", _Phase.PARKED, ["leave", "join"]),
        (_Phase.PARKED, [Stop(2)], "", _Phase.PARKED, []),
        # L4
        (_Phase.PARKED, [GO], "", _Phase.PARKED, ["round 3"]),
        (_Phase.PARKED, [Go(6, 0, 1, ())], "", _Phase.PARKED, ["round 0"]),
        (_Phase.PARKED, [Go(5, 2, 1, ())], "", _Phase.PARKED, []),
        (_Phase.PARKED, [Go(4, 9, 1, ())], "", _Phase.PARKED, []),
        (_Phase.STOPPING, [GO], "", _Phase.STOPPING, []),
        (_Phase.RUNNING, [GO], "", _Phase.RUNNING, []),
    ],
)
def test_each_state_and_each_word_of_the_hub(phase, messages, lost, then, did):  # type: ignore[no-untyped-def]
    scene = Scene(phase)
    assert (scene.take(*messages, lost=lost), scene.did) == (then, did)
    assert not scene.supervisor._ended.lost


@pytest.mark.parametrize(
    "change",
    [
        {"holds": False}, {"met": False}, {"phase": _Phase.SUCCEEDED},
        {"signal": 15}, {"end": End(-1, "no", graceful=False)},
    ],
)  # fmt: skip
def test_who_does_not_hold_ends_when_the_hub_is_lost(change):  # type: ignore[no-untyped-def]
    made = {name: change[name] for name in ("holds", "met") if name in change}
    scene = Scene(change.get("phase", _Phase.RUNNING), **made)
    scene.supervisor._ended.signal = change.get("signal", 0)
    scene.supervisor._ended.end = change.get("end")
    scene.take(lost="gone")
    assert scene.supervisor._ended.lost == "gone"
    assert "leave" not in scene.did


@pytest.mark.parametrize(("phase", "seconds"), [(_Phase.STOPPING, 20.0), (_Phase.PARKED, 330.0)])
def test_nobody_waits_for_ever(phase, seconds):  # type: ignore[no-untyped-def]
    """Neither for a Go, nor for processes that nothing can end."""
    scene = Scene(phase)
    scene.take(now=100.0 + seconds)
    assert not scene.supervisor._ended.lost
    scene.take(now=100.1 + seconds)
    assert scene.supervisor._ended.lost == "it does not answer"
    assert scene.did == ["stop 1"]


def test_one_that_holds_after_a_failure_seeks_the_hub_in_peace() -> None:
    scene = Scene(_Phase.PARKED)
    scene.supervisor._ended.waiting_since = 99.0
    scene.link.unmet = "nobody listens at job-0 port 2"
    scene.take(now=200.0)
    assert (scene.did, scene.supervisor._ended.lost) == ([], "")


def test_workers_that_may_save_have_their_time_when_the_hub_is_gone() -> None:
    scene = Scene(_Phase.STOPPING)
    scene.workers.kill_at = 130.0
    scene.take(now=149.0)
    assert not scene.supervisor._ended.lost


def test_one_that_holds_ends_at_a_signal() -> None:
    scene = Scene(_Phase.PARKED)
    bare: Any = scene.supervisor
    bare._signals = SimpleNamespace(pending=[15])
    scene.workers.signal = lambda signum, now: None
    scene.workers.running = 0
    bare._forward(101.0)
    scene.take(GO)
    assert scene.did == ["Leaving", "grace"]
    assert bare._ended.between_rounds
    assert bare._is_finished(101.0)


def test_one_that_holds_ends_when_all_have_succeeded() -> None:
    scene = Scene(_Phase.PARKED)
    scene.workers.running, scene.workers.succeeded = 0, True
    assert not scene.supervisor._is_finished(101.0)
    scene.take(Finished())
    assert scene.supervisor._is_finished(101.0)
    assert not scene.supervisor._ended.stood_by, "its replica has succeeded"


def test_a_long_restore_of_the_working_directory_silences_no_link() -> None:
    scene = Scene(_Phase.PARKED)
    heard, answered = Event(), []
    bare: Any = scene.supervisor
    bare._selector = selectors.DefaultSelector()
    bare._member.tick = lambda now: heard.set()
    bare._config.env.trace, bare._config.env.drill, bare._began = None, "Never", True
    bare._refill = lambda path: answered.append(heard.wait(20.0))
    bare._hangs = bare._pace = SimpleNamespace(begin=lambda: None)
    bare._group = lambda key: scene.workers
    bare._runtime_dir, bare._results = SimpleNamespace(path="here"), SimpleNamespace(records=())
    bare._pump = SimpleNamespace(tail=None)
    bare._starter = SimpleNamespace(begin=lambda *given: scene.did.append("begin"))
    bare._begin(Key(5, 3), 101.0)
    bare._selector.close()
    assert (answered, scene.did) == ([True], ["begin"])


# --- Standbys ------------------------------------------------------------------------------------


def test_a_hello_names_the_replica_that_was_served_last(make):  # type: ignore[no-untyped-def]
    launcher = make(PARKED)
    launcher.linked(5, "hub").received(Go(5, 1, 2, ()), 1.0)
    launcher.client.leave()
    launcher.client.join()
    line: Any = Line()
    launcher.client._ask(line)
    assert line.sent == [dataclasses.replace(PARKED, held=2)]


def test_one_that_waits_at_a_hub_waits_as_long_as_there_is_one() -> None:
    scene = Scene(_Phase.PARKED)
    scene.link.linked = True
    scene.take(now=5000.0)
    scene.link.linked = False
    assert scene.take(lost="gone", now=5001.0) is _Phase.PARKED
    assert scene.did == ["leave", "join"]
    scene.take(now=5330.0)
    assert not scene.supervisor._ended.lost
    scene.take(now=5340.0)
    assert scene.supervisor._ended.lost == "it does not answer"


def test_one_that_waits_ends_when_all_have_finished() -> None:
    scene = Scene(_Phase.PARKED)
    scene.workers.running, scene.workers.succeeded = 0, False
    bare: Any = scene.supervisor
    assert not bare._is_finished(101.0)
    scene.take(Finished(), lost="the hub has ended, too")
    assert bare._is_finished(101.0)
    assert (scene.did, bare._ended.stood_by, bare._ended.lost) == ([], True, "")
