"""Requests to warm spares, and what a spare learns from a program's source."""

from __future__ import annotations

import os
import selectors
import socket

import pytest

from ddpjob_trainer.launcher.processes import fork_server
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.processes.spares import Spares, uses_our_library


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
        ("import os, json.decoder", ["os", "json.decoder"]),
        ("from json import loads", ["json"]),
        ("def f():\n    import torch", []),
        ("from . import sibling", []),
    ],
)
def test_what_a_program_imports_at_its_top_level(source, modules):  # type: ignore[no-untyped-def]
    assert list(fork_server.imports_of(source.encode(), "")) == modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import ddpjob_trainer as ddp", True),
        ("def main():\n    from ddpjob_trainer.task import x", True),
        ("import torch", False),
        # It meets the others by itself, on a port that no launcher may hold for it.
        ("from ddpjob_trainer.adapters.accelerate import follow", False),
        ("import ddpjob_trainer.adapters.accelerate, ddpjob_trainer.task", True),
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
        Program("x.py", (), False), 1, os.environ, selector, lambda *_: None, told.append
    )
    mine, theirs = socket.socketpair()
    spares._server, spares._warm = mine, True
    selector.register(spares._server, selectors.EVENT_READ, spares._server_spoke)
    for death in (1, 2, 3):
        spares.refill(lambda _: {})
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


def test_without_descriptors_there_is_no_spare_and_no_harm(monkeypatch):
    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    selector = selectors.DefaultSelector()
    spares = Spares(Program("x.py", (), False), 1, os.environ, selector, lambda *_: None, print)
    spares._server, theirs = socket.socketpair()
    spares._warm = True
    monkeypatch.setattr(socket, "socketpair", none_left)
    spares.refill(lambda _: {})
    assert not spares.full
    monkeypatch.undo()
    spares.refill(lambda _: {})
    assert spares.full
    theirs.close()
