"""Launchers of two versions in one gang: what one says the other reads, or passes over."""

import contextlib
import hashlib
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddpjob_trainer.launcher.hub import messages
from ddpjob_trainer.launcher.hub.membership import HubClient
from ddpjob_trainer.launcher.hub.messages import (
    Ask,
    Beat,
    Call,
    Done,
    End,
    Exiting,
    Failed,
    Finished,
    Go,
    Hello,
    Leaving,
    Message,
    Refused,
    Rescuing,
    Stop,
    Stopped,
    Welcome,
    decode,
    encode,
)
from ddpjob_trainer.launcher.hub.root_cause import Exit
from support import frozen
from support.hub_port import Port
from support.patience import PATIENCE

HUB = Hello(
    "uid", "pod-0", seat=0, birth=1, replicas=2, nproc=1, holds=False, running=True, token="t"
)
OTHER = replace(HUB, seat=1, pod="pod-1")
EXIT = Exit(1, 0, -9, 0.5, ours=True, exception="é", step=4, done=True, oom=True)
#: One of each, with something in each field.
SAID: list[Message] = [
    Hello("uid", "pod-1", 1, 2, 3, 4, True, False, standby=1, held=2, token="t"),
    Failed(2, (EXIT, Exit(0, 0, 75, 0.5, step=4, drill=True)), 1),
    Exiting(3),
    Stopped(1, (EXIT,), 7),
    Done(2, (EXIT,)),
    Leaving(15),
    Call("uid", 4, "pod-0", token="t"),
    Welcome(4, "pod-0"),
    Refused("why", final=True),
    Stop(2, graceful=True),
    Go(4, 1, 2, ({"round": 0, "rank": 1, "kind": "signal", "at": "now"},)),
    End(-1, "x", graceful=True, early="rank 1"),
    Beat(),
    Finished(),
]
#: It says again what it has read.
ECHO = """
import sys
from ddpjob_trainer.launcher.hub import messages
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(messages.encode(messages.decode(line.strip())))
"""
#: What the version before does not know is sent only where it says something.
NEW = [
    Failed(0, (Exit(1, 0, 75, 0.5, foreign=True), Exit(2, 1, 1, 0.5, in_script=True)), 1),
    End(1, "x", graceful=False, code=64),
    Hello("uid", "pod-1", 1, 2, 3, 4, True, False, rescues=True),
    Stop(2, rescue="write"),
    Rescuing(2, "word", "11 a b"),  # answers such a Stop
    Hello("uid", "pod-1", 1, 2, 3, 4, True, False, hears=True),
    Beat(2500),  # to who hears, and its answer
    Hello("uid", "pod-1", 1, 2, 3, 4, True, False, sizes=True),
    Go(4, 1, 2, (), size=2),  # to who knows sizes
    Ask(3),  # to the hub's own launcher
]
LATER = b'{"type":"Regrow","size":2}\n'


def test_the_version_before_is_the_one_that_its_page_says():
    page = (frozen.WHEELS / "README.md").read_text()
    for wheel in frozen.WHEELS.glob("*.whl"):
        assert f"`{wheel.name}` | `{hashlib.sha256(wheel.read_bytes()).hexdigest()}`" in page


@pytest.mark.fault("T20")
def test_each_message_is_read_by_the_version_before_and_its_own_here(tmp_path):
    """It closes the link at what it does not know: see docs/internals/api-plan.md."""
    assert {type(one) for one in [*SAID, *NEW]} == set(messages._TYPES.values())
    older = subprocess.run(
        [sys.executable, "-c", ECHO],
        env={"PYTHONPATH": frozen.unpacked("ddpjob_trainer", tmp_path)},
        input=b"".join(map(encode, SAID)), capture_output=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert older.returncode == 0, older.stderr.decode()
    assert [decode(line) for line in older.stdout.splitlines()] == SAID


@pytest.mark.fault("T20")
@pytest.mark.parametrize("message", [*SAID, *NEW])
def test_fields_of_a_later_version_are_left_out(message):
    body = json.loads(encode(message))
    for part in (body, *body.get("exits", ())):
        part |= {"later": [{"deep": None}], "__class__": 1, "self": 2}
    assert decode(json.dumps(body).encode()) == message


def test_a_field_that_an_earlier_version_does_not_send_is_its_default():
    body = json.loads(encode(HUB))
    del body["held"], body["token"]
    assert decode(json.dumps(body).encode()) == replace(HUB, token="")


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.closing(Port(HUB)) as found:
        yield found


@pytest.mark.fault("T20")
def test_a_hub_passes_over_a_message_of_a_later_version_and_says_so_once(port):
    with port.connect() as launcher:
        launcher.sendall(encode(OTHER) + LATER * 100 + encode(Failed(0, (EXIT,), 0)))
        port.hear()
        assert port.hub.is_present(1)
        assert port.hub.outcome.exits.keys() == {1}, "what comes after it is heard"
    [said] = port.said
    assert "Regrow" in said
    assert "the same image?" in said


@pytest.mark.fault("T20")
def test_a_launcher_passes_over_a_message_of_a_later_hub_and_says_so_once():
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, selectors.DefaultSelector() as ready:
        client = HubClient(listening.getsockname(), OTHER, ready, said.append)
        hub, _ = listening.accept()
        with hub:
            hub.sendall(encode(Welcome(1, "pod-0")) + LATER * 100 + encode(Stop(0)))
            while not (client.inbox or client.lost):
                for key, _ in ready.select(PATIENCE):
                    key.data(100.0)
        assert client.linked
        assert list(client.inbox) == [Stop(0)]
        client.close()
    [told] = said
    assert "Regrow" in told


@pytest.mark.parametrize(
    "first", [LATER, b'{"type":"Unknown","kind":"x"}\n', encode(Beat()), b'{"type":""}\n']
)
def test_a_stranger_that_begins_with_it_is_closed_at_once_and_not_quoted(port, first):
    with port.connect() as stranger:
        stranger.sendall(first + encode(OTHER))
        port.hear()
        assert stranger.recv(100) == b""
    assert not port.hub.is_present(1)
    assert port.said == []


@pytest.mark.parametrize("kind", ["\\u001b[2J", "x" * 41, "a\\nb", "é", "no such", ""])
def test_what_no_version_would_call_a_message_is_none(kind):
    with pytest.raises(ValueError, match="not a message"):
        decode(f'{{"type":"{kind}"}}'.encode())
