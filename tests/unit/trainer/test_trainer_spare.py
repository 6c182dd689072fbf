"""Requests to warm spares, and what a spare learns from a program's source."""

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_trainer.launcher.processes import fork_server
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.processes.source import uses_our_library
from ddpjob_trainer.launcher.processes.spares import Call, Spares
from ddpjob_trainer.launcher.starter import Starter


def made(count: int = 1, told: Callable[[str], None] = pytest.fail) -> Spares:
    program = Program("x.py", (), False)
    return Spares(program, count, {}, (), selectors.DefaultSelector(), told)


def served(spares: Spares, *, warm: bool) -> socket.socket:
    spares._server, theirs = fork_server.pair()
    spares._server.setblocking(False)
    spares._warm = warm
    spares._selector.register(spares._server, selectors.EVENT_READ, spares._server_spoke)
    return theirs


def heard(line: socket.socket) -> tuple[dict[str, Any], int]:
    request = fork_server.receive(line)
    return request[0], request[1][0]


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("'''It.'''\nimport os, json.decoder", [("os", ()), ("json.decoder", ())]),
        ("from json import loads, decoder", [("json", ("loads", "decoder"))]),
        ("def f():\n    import torch", []),
        ("from . import sibling", []),
        ("import sys\nsys.path.insert(0, 'x')\nimport json", [("sys", ())]),
        ("import os\nif os.sep:\n    os.linesep = ''\nimport json", [("os", ())]),
        ("import os\ndef f():\n    os.abort()\nimport json", [("os", ()), ("json", ())]),
    ],
)
def test_what_a_program_imports_at_its_top_level(source, modules):
    assert list(fork_server.imports_of(source.encode(), "")) == modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import ddpjob_trainer as ddp", True),
        ("def main():\n    from ddpjob_trainer.options import x", True),
        ("import torch", False),
        # It meets the others by itself, on a port that no launcher may hold for it.
        ("from ddpjob_trainer.adapters.accelerate import follow", False),
        ("import ddpjob_trainer.adapters.accelerate, ddpjob_trainer.options", True),
        ("from . import ddpjob_trainer", False),
        ("not python", False),
    ],
)
def test_only_programs_that_import_us_get_spares(tmp_path, text, expected):
    path = tmp_path / "train.py"
    path.write_text(text)
    assert uses_our_library(Program(str(path), (), False)) is expected


def test_a_fork_server_that_imports_keeps_no_launcher_waiting():
    """What its socket does not take is refused, and a fresh interpreter takes its place."""
    spares = made(1000)
    theirs = served(spares, warm=False)
    call = Call({"RANK": "0"}, 1, 2, {})
    taken = []
    with contextlib.suppress(LookupError):
        for local_rank in range(1000):
            spares.call(local_rank, call, 0.0)
            taken.append(local_rank)
    assert 8 < len(taken) < 1000
    while True:  # there is room again
        body, line = heard(theirs)
        assert body == {"env": {"RANK": "0"}, "called": True, "compiler": False}
        os.close(line)
        with contextlib.suppress(LookupError):
            assert spares.call(len(taken), call, 0.0) is None
            break
    spares.recall()
    theirs.close()
    assert spares.arrivals() == []


def test_calls_wait_for_a_fork_server_that_imports_and_can_be_taken_back():
    """They are answered by fresh interpreters when it dies, and by nobody once taken back."""
    spares = made(3)
    call = Call({"RANK": "0"}, 1, 2, {})
    with pytest.raises(LookupError):
        spares.call(0, call, 0.0)
    theirs = served(spares, warm=False)
    assert [spares.call(local_rank, call, 0.0) for local_rank in range(3)] == [None] * 3
    assert spares.tick(60.0) == 120.0
    body, fd = heard(theirs)
    assert body == {"env": {"RANK": "0"}, "called": True, "compiler": False}
    assert spares.arrivals() == []
    fork_server.send(theirs, {"warm": True, "warnings": ""}, [])
    spares._server_spoke(100.0)
    assert spares.tick(100.0) == 110.0  # from now on it answers at once
    with socket.socket(fileno=fd) as line:
        fork_server.send(line, {"pid": os.getpid()}, [])
        spares._spare_spoke(0, spares._spares[0].line, 101.0)
        found, given = fork_server.receive(line) or ({}, [])
        assert found["env"] == {"RANK": "0"}
        for one in given:
            os.close(one)
    assert spares.arrivals() == [(0, os.getpid())]
    spares.recall(awaited=[2])
    theirs.close()
    for key, _ in spares._selector.select(0):
        key.data(102.0)
    [(local_rank, failed)] = spares.arrivals()
    assert isinstance(failed, Call)
    assert (local_rank, failed.env) == (2, call.env)
    failed.close()


def test_the_last_words_of_who_ended_with_messages_unread_are_heard():
    """The kernel reports the reset first."""
    mine, theirs = fork_server.pair()
    fork_server.send(mine, {"called": True}, [])
    fork_server.send(theirs, {"unfit": "why"}, [])
    theirs.close()
    assert fork_server.receive(mine) == ({"unfit": "why"}, [])
    assert fork_server.receive(mine) is None
    mine.close()


def test_without_spares_nothing_is_preloaded_which_is_told():
    told: list[str] = []
    program = Program("x.py", (), False)
    Spares(program, 0, {}, ("json",), selectors.DefaultSelector(), told.append)
    assert told == ["warning: no warm spares, so each process imports --preload's modules itself"]


def test_spares_of_another_rank_end_and_are_not_called():
    spares = made()
    theirs = served(spares, warm=True)
    spares.refill(lambda local_rank: {"RANK": "1"})
    _, line = heard(theirs)
    os.set_blocking(line, False)
    spares.forget()
    assert os.read(line, 1) == b"", "it reads the end of its line, and exits"
    out = os.open(os.devnull, os.O_WRONLY)
    assert spares.call(0, Call({"RANK": "2"}, out, out, {}), 2.0) is None
    body, again = heard(theirs)
    assert body == {"env": {"RANK": "2"}, "called": True, "compiler": False}
    for fd in (out, line, again):
        os.close(fd)
    spares.recall()


@pytest.mark.parametrize(("replica", "forked"), [(1, True), (3, False)])
def test_who_knows_no_replica_yet_has_the_imports_ready_and_no_spare(replica, forked):
    did: list[str] = []
    starter: Any = object.__new__(Starter)
    starter._config = SimpleNamespace(
        replica=replica, replicas=3, uses_our_library=True, elastic=None
    )
    starter._workers = SimpleNamespace(
        key=(1, -1), stopping=False, is_training=lambda: False, compiles=lambda: False
    )
    starter._begun = 0.0
    starter.spares = SimpleNamespace(
        tick=lambda now: None, arrivals=list, full=False, start=lambda: did.append("server"),
        refill=lambda env, compiler: did.append("spares"),
    )  # fmt: skip
    starter.refill(5.0, parked=True)
    assert did == (["spares"] if forked else ["server"])
