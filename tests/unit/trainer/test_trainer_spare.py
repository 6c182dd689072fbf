"""Requests to warm spares, and what a spare learns from a program's source."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from unittest.mock import ANY

import pytest

from ddpjob_trainer.launcher.processes import children, fork_server
from ddpjob_trainer.launcher.processes.fork_server import Import, Program
from ddpjob_trainer.launcher.processes.source import sets_environment_first, uses_our_library
from ddpjob_trainer.launcher.processes.spares import Call, Spares


def test_a_spare_that_hears_and_closes_at_once_has_heard(monkeypatch):  # type: ignore[no-untyped-def]
    """Else the launcher starts a second process for the same rank."""
    mine, theirs = socket.socketpair()
    send_fds = socket.send_fds

    def quick(to, data, fds):  # type: ignore[no-untyped-def]
        sent = send_fds(to, data, fds)
        assert fork_server.receive(theirs) == ({"env": {}}, [])
        theirs.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", quick)
    with mine:
        fork_server.send(mine, {"env": {}}, [])


def test_what_does_not_fit_at_once_is_sent_too(monkeypatch):  # type: ignore[no-untyped-def]
    mine, theirs = socket.socketpair()
    send_fds = socket.send_fds
    monkeypatch.setattr(socket, "send_fds", lambda to, data, fds: send_fds(to, [data[0][:5]], fds))
    with mine, theirs:
        fork_server.send(mine, {"env": {"A": "b"}}, [])
        assert fork_server.receive(theirs) == ({"env": {"A": "b"}}, [])


def test_a_request_cut_off_is_none():
    mine, theirs = socket.socketpair()
    with theirs:
        mine.sendall(b'{"env"')
        mine.close()
        assert fork_server.receive(theirs) is None


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import os, json.decoder", [Import("os"), Import("json.decoder")]),
        ("from json import loads, decoder", [Import("json", ("loads", "decoder"))]),
        ("def f():\n    import torch", []),
        ("from . import sibling", []),
        ("import os\nx = len('a')\nimport json", [Import("os"), Import("json")]),
        ("import sys\nsys.path.insert(0, 'x')\nimport json", [Import("sys")]),
        ("import os\nos.environ['A'] = 'b'\nimport json", [Import("os")]),
        ("import os\nif os.sep:\n    os.linesep = ''\nimport json", [Import("os")]),
        ("import os\ndel os.linesep\nimport json", [Import("os")]),
        ("import os\ndef f():\n    os.abort()\nimport json", [Import("os"), Import("json")]),
    ],
)
def test_what_a_program_imports_at_its_top_level(source, modules):  # type: ignore[no-untyped-def]
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
def test_only_programs_that_import_us_get_spares(tmp_path, text, expected):  # type: ignore[no-untyped-def]
    path = tmp_path / "train.py"
    path.write_text(text)
    assert uses_our_library(Program(str(path), (), False)) is expected


def test_a_spare_and_its_fork_server_may_die_in_the_same_moment():
    """select() returns both; the third death of a spare makes the server be forgotten."""
    told: list[str] = []
    selector = selectors.DefaultSelector()
    spares = Spares(
        Program("x.py", (), False), 1, os.environ, (), selector, lambda *_: None, told.append
    )
    mine, theirs = socket.socketpair()
    spares._server, spares._warm = mine, True
    selector.register(spares._server, selectors.EVENT_READ, spares._server_spoke)
    for death in (1, 2, 3):
        spares.refill(lambda _: {}, 0.0)
        spares._spares[0].pid = 2**22 + 1  # known, but it was never ready
        request = fork_server.receive(theirs)
        assert request is not None
        os.close(request[1][0])  # it dies
        if death == 3:
            theirs.close()
        ready = [key for key, _ in selector.select(0)]
        assert len(ready) == (2 if death == 3 else 1)
        for key in sorted(ready, key=lambda key: key.data == spares._server_spoke):
            key.data(0.0)
    assert told == ["no warm spares: a spare died 3 times in a row"]


def test_without_spares_nothing_is_preloaded_which_is_told():
    told: list[str] = []
    program = Program("x.py", (), False)
    Spares(program, 0, {}, ("json",), selectors.DefaultSelector(), lambda *_: None, told.append)
    assert told == ["warning: --preload is left to each process, as there are no warm spares"]


def test_without_descriptors_there_is_no_spare_and_no_harm(monkeypatch):
    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    selector = selectors.DefaultSelector()
    spares = Spares(Program("x.py", (), False), 1, os.environ, (), selector, lambda *_: None, print)
    spares._server, theirs = socket.socketpair()
    spares._warm = True
    monkeypatch.setattr(socket, "socketpair", none_left)
    spares.refill(lambda _: {}, 0.0)
    assert not spares.full
    monkeypatch.undo()
    spares.refill(lambda _: {}, 0.0)
    assert spares.full
    theirs.close()


def test_a_fork_server_that_imports_keeps_no_launcher_with_many_workers_waiting(monkeypatch):  # type: ignore[no-untyped-def]
    """What its socket does not take is refused, and a fresh interpreter takes its place."""
    ends: list[socket.socket] = []

    def spawn(command: object, env: object, out: object, err: object, fds: tuple[int]) -> int:
        ends.append(socket.socket(fileno=os.dup(fds[0])))
        return 2**22 + 1

    monkeypatch.setattr(children, "spawn", spawn)
    selector = selectors.DefaultSelector()
    spares = Spares(Program("x.py", (), False), 400, {}, (), selector, lambda *_: None, pytest.fail)
    spares.start(0.0)
    call = Call({"RANK": "0"}, 1, 2, {})
    taken = []
    with contextlib.suppress(LookupError):
        for local_rank in range(400):
            spares.call(local_rank, call, 0.0)
            taken.append(local_rank)
    assert 8 < len(taken) < 400
    request = fork_server.receive(ends[0])
    assert request == ({"env": {"RANK": "0"}, "called": True}, [ANY])
    os.close(request[1][0])
    assert spares.call(len(taken), call, 0.0) is None  # there is room again
    assert spares.recall() == [*taken, len(taken)]
    ends[0].close()


def test_a_request_of_which_only_a_part_could_be_sent_is_no_request(monkeypatch):  # type: ignore[no-untyped-def]
    """Else the next would be taken for its rest."""
    mine, theirs = socket.socketpair()
    send_fds = socket.send_fds

    def part(to, data, fds):  # type: ignore[no-untyped-def]
        sent = send_fds(to, [data[0][:5]], fds)
        with contextlib.suppress(BlockingIOError):
            while True:
                to.send(b" " * 4096)
        return sent

    monkeypatch.setattr(socket, "send_fds", part)
    mine.setblocking(False)
    with mine, theirs, pytest.raises(ConnectionError, match="cut short"):
        fork_server.send(mine, {"env": {}}, [])


def test_calls_wait_for_a_fork_server_that_imports_and_can_be_taken_back():
    """They are answered by fresh interpreters when it dies, and by nobody once taken back."""
    came: list[tuple[int, int]] = []
    selector = selectors.DefaultSelector()
    spares = Spares(
        Program("x.py", (), False), 3, {}, (), selector,
        lambda local_rank, pid, call, now: came.append((local_rank, pid)), pytest.fail,
    )  # fmt: skip
    call = Call({"RANK": "0"}, 1, 2, {})
    with pytest.raises(LookupError):
        spares.call(0, call, 0.0)
    mine, theirs = socket.socketpair()
    spares._server = mine
    selector.register(mine, selectors.EVENT_READ, spares._server_spoke)
    assert [spares.call(local_rank, call, 0.0) for local_rank in range(3)] == [None] * 3
    assert spares.tick(60.0) == 120.0
    body, (fd,) = fork_server.receive(theirs) or ({}, [])
    assert (body, came) == ({"env": {"RANK": "0"}, "called": True}, [])
    fork_server.send(theirs, {"warm": True}, [])
    spares._server_spoke(100.0)
    assert spares.tick(100.0) == 110.0  # from now on it answers at once
    with socket.socket(fileno=fd) as line:
        fork_server.send(line, {"pid": os.getpid()}, [])
        spares._spare_spoke(0, spares._spares[0].line, 101.0)
        heard = fork_server.receive(line)
        assert heard is not None
        assert heard[0]["env"] == {"RANK": "0"}
        for given in heard[1]:
            os.close(given)
    assert came == [(0, os.getpid())]
    assert spares.recall() == [1, 2]
    theirs.close()
    for key, _ in selector.select(0):
        key.data(102.0)
    assert came == [(0, os.getpid())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nimport torch", False),
        ("import os\nos.environ['A'] = 'b'\nimport torch", True),
        ("import os\nif True:\n    os.environ.setdefault('A', 'b')\nfrom torch import nn", True),
        ("from os import environ\nenviron.update(A='b')\nimport torch", True),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", True),
        ("import os\ndel os.environ['A']\nimport torch", True),
        ("import os\nrank = os.environ['RANK']\nimport torch", False),
        ("import os\nimport torch\nos.environ['A'] = 'b'", False),
        ("import os\ndef f():\n    os.environ['A'] = 'b'\nimport torch", False),
    ],
)
def test_environment_that_is_set_between_imports_is_seen(tmp_path, source, expected):  # type: ignore[no-untyped-def]
    path = tmp_path / "train.py"
    path.write_text(source)
    assert sets_environment_first(Program(str(path), (), False)) is expected
