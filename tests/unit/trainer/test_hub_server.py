"""The limits of the hub's port: strangers cannot keep a launcher of the gang out."""

import contextlib
import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from ddpjob_trainer.launcher.hub.membership import HubClient
from ddpjob_trainer.launcher.hub.messages import (
    Beat,
    Call,
    Failed,
    Hello,
    Refused,
    Welcome,
    decode,
    encode,
)
from ddpjob_trainer.launcher.hub.root_cause import Exit
from support.descriptors import none_left
from support.hub_port import Port

GANG = Hello(
    "uid", "pod-0", seat=0, birth=1, replicas=2, nproc=1, holds=False, running=True
)  # fmt: skip
OTHER = replace(GANG, seat=1, pod="pod-1")
WELCOME = encode(Welcome(1, "pod-0"))


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.closing(Port(GANG)) as found:
        yield found


def hello(uid: str = "uid") -> bytes:
    return encode(replace(OTHER, uid=uid))


def test_strangers_are_dropped_unless_they_are_admitted(port):
    silent, refused, launcher = (port.connect() for _ in range(3))
    refused.sendall(hello("another's") * 2)
    launcher.sendall(hello())
    port.hear(100.0)
    assert launcher.recv(1000) == WELCOME
    assert b"belongs to another job" in refused.recv(1000)
    assert refused.recv(1) == b"", "it spoke again"
    port.server.tick(105.0)
    assert silent.recv(1) == b""
    for one in (silent, refused, launcher):
        one.close()


@pytest.mark.fault("T15")
def test_of_300_strangers_the_oldest_make_room_for_a_launcher(port):
    strangers = [port.connect() for _ in range(300)]
    port.hear(100.0)
    with port.connect() as launcher:
        launcher.sendall(hello())
        port.hear(100.0)
        assert launcher.recv(1000) == WELCOME
    assert [one.recv(1) for one in strangers[:45]] == [b""] * 45
    for one in strangers[45:]:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)
    strangers[-1].sendall(hello("another's"))
    port.hear(100.0)
    assert b"belongs to another job" in strangers[-1].recv(1000)
    for one in strangers:
        one.close()


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.fault("T15")
def test_a_stranger_has_4_kib_and_a_launcher_more(port, end):
    long = Failed(0, (Exit(1, 0, 1, 0.0, exception="x" * 5000),), 0)
    with port.connect() as stranger, port.connect() as launcher:
        stranger.sendall(hello("u" * 5000).rstrip() + end)
        launcher.sendall(hello() + encode(long))
        port.hear(100.0)
        assert stranger.recv(1000) == b""
        assert launcher.recv(1000).startswith(WELCOME)
        assert port.hub.is_present(1)


@pytest.mark.fault("T16")
def test_a_link_is_lost_after_5_seconds_of_silence_at_a_running_loop(port):
    """At either end, and whatever the clock says meanwhile: an own pause counts for nothing."""
    client = HubClient(port.address, OTHER, port.selector, lambda said: None)
    while not client.met:
        port.hear(100.0)
    assert port.hub.facts["away"] == []
    now = 100.0
    for _ in range(20):
        now += 1.0
        port.server.tick(now)
        client.tick(now)
        port.hear(now)
    now += 3600.0
    for _ in range(5):
        now += 1.0
        client.tick(now)  # nobody speaks: the hub does not run
        client.tick(now)
    assert (client.lost, port.hub.facts["away"]) == ("", [])
    client.tick(now + 1.0)
    assert client.lost == "it was silent for 5 s"
    client.leave()
    client.close()


@pytest.mark.parametrize(("hears", "known"), [(True, 95.0), (False, 100.0)])
def test_launchers_exchange_how_old_the_newest_line_is(port, hears, known):
    """In ages: each has its own clock. One that does not know it may have printed just now."""
    hello = replace(OTHER, hears=hears)
    client = HubClient(port.address, hello, port.selector, lambda said: None)
    port.lines.gang, client.lines.here = 10.0, 95.0
    while not client.met:
        port.hear(100.0)
    port.server.tick(100.0)
    port.hear(100.0)
    assert port.lines.gang == known
    assert client.lines.gang == (10.0 if hears else math.inf)
    port.server.tick(102.0)
    port.hear(102.0)
    assert client.lines.gang == (95.0 if hears else math.inf)
    client.close()


@pytest.mark.fault("T16")
def test_a_launcher_that_does_not_answer_the_hub_is_away(port):
    with port.connect() as launcher:
        launcher.sendall(hello())
        port.hear(100.0)
        for second in range(1, 6):
            assert port.server.tick(99.0 + second) is not None
        assert port.hub.facts["away"] == []
        port.server.tick(100.0 + 3600.0)
        said = launcher.recv(1000)
        assert said.startswith(WELCOME + encode(Beat()))
    assert not port.hub.runs, "a gang that does not hold ends"
    assert not port.hub.is_present(1)


@pytest.mark.fault("T15")
@pytest.mark.parametrize(("here", "there", "enters"), [
    ("secret", "secret", True), ("secret", "", False), ("secret", "another", False),
    ("", "", True), ("", "secret", True),
])  # fmt: skip
def test_nobody_is_admitted_or_followed_without_the_secret(here, there, enters):
    """It may be right later; a pod that was made without one asks for none."""
    with contextlib.closing(Port(replace(GANG, token=here))) as port, port.connect() as launcher:
        launcher.sendall(encode(replace(OTHER, token=there)))
        port.hear(100.0)
        answer = decode(launcher.recv(1000))
        mine = replace(OTHER, token=here)
        client = HubClient(port.address, mine, port.selector, lambda said: None)
        refused = client.called(Mock(), Call("uid", 2, "hub", there), 100.0)
        client.close()
    if enters:
        assert (answer, refused) == (Welcome(1, "pod-0"), None)
    else:
        why = "does not know the secret of the"
        assert answer == Refused(f"this launcher {why} hub's job", final=False)
        assert refused == Refused(f"this hub {why} launcher's job", final=False)
    assert "secret" not in repr(replace(OTHER, token="secret"))


@pytest.mark.parametrize(
    "line",
    [
        b"", b"GET / HTTP/1.1", b"[]", b"{}", b'{"type":["Done"]}', b'{"type":"Done"}',
        b'{"type":"Done","round":"0"}', b'{"type":"Done","round":true}',
        b'{"type":"Done","round":0,"exits":{}}', b'{"type":"Done","round":0,"exits":null}',
        b'{"type":"Stopped","round":0,"exits":[7],"snapshot_step":0}',
        b'{"type":"Stopped","round":0,"exits":[{"rank":"1"}],"snapshot_step":0}',
        b'{"type":"Go","number":1,"round":1,"replica":0,"records":["x"]}',
        b"\xff", b"[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(line):
    with pytest.raises((ValueError, TypeError, RecursionError)):
        decode(line)


def test_without_descriptors_the_port_costs_no_processor(port):
    """select() would return at once, again and again, with the processor that workers need."""
    with socket.socket() as launcher:
        with none_left():
            launcher.connect(port.address)
            launcher.sendall(hello())
            port.hear(100.0)  # comes to an end
            due = port.server.tick(100.0)
            assert due is not None
            assert due > 100.0
        port.hear(due)
        assert port.server.tick(due) is None
        port.hear(due)
        assert launcher.recv(1000) == WELCOME
        port.hear(due)


def test_a_port_without_descriptors_can_be_closed():
    port = Port(GANG)
    with socket.socket() as launcher, none_left():
        launcher.connect(port.address)
        port.hear(100.0)
        port.close()


def test_who_is_not_admitted_says_why_and_once(port):
    port.hub.admit(OTHER, 0.0)
    said: list[str] = []
    client = HubClient(port.address, OTHER, port.selector, said.append)
    refusals = 0
    while refusals < 3:
        for key, _ in port.selector.select():
            before, client.unmet = client.unmet, ""
            key.data(100.0)
            refusals += bool(client.unmet)
            client.unmet = client.unmet or before
    client.close()
    why = "replica 1 has been admitted before"
    assert said == [f"the hub does not admit this launcher yet: {why}"]
