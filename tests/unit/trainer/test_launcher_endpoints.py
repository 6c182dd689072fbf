"""The launcher's HTTP port: neither a resolver nor its end keeps the supervisor waiting."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from ddpjob_contract import State
from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.reports import endpoints
from ddpjob_trainer.launcher.reports.metrics import LauncherMetrics
from ddpjob_trainer.launcher.reports.state import answer
from support.descriptors import none_left
from support.patience import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_IDLE_SECONDS", 2 * PATIENCE)  # longer than clients wait


def test_it_serves_without_a_resolver_and_frees_its_port_at_the_end(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    def resolve(*_: object) -> str:
        pytest.fail("asks for a name")

    monkeypatch.setattr(socket, "getfqdn", resolve)
    monkeypatch.setattr(socket, "gethostbyaddr", resolve)
    server = endpoints.serve(0, tmp_path, LauncherMetrics(), lambda: {"version": 1}, lambda: True)
    port = server.socket.getsockname()[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE) as reply:
        assert reply.read() == b"ok\n"
    server.end()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_strangers_who_connect_and_say_nothing_make_room_for_others(tmp_path):  # type: ignore[no-untyped-def]
    """Else they hold the descriptors that the next round needs."""
    server = endpoints.serve(0, tmp_path, LauncherMetrics(), lambda: {"version": 1}, lambda: True)
    address = ("127.0.0.1", server.socket.getsockname()[1])
    silent = [socket.create_connection(address, timeout=PATIENCE) for _ in range(40)]
    url = f"http://127.0.0.1:{address[1]}/healthz"
    with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
        assert reply.read() == b"ok\n"
    assert silent[0].recv(1) == b""
    assert len(server._connections) <= endpoints._MAX_CONNECTIONS
    for one in silent:
        one.close()
    server.end()


def test_a_request_that_does_not_end_is_answered_and_closed_before_it_fills_the_memory(tmp_path):  # type: ignore[no-untyped-def]
    server = endpoints.serve(0, tmp_path, LauncherMetrics(), lambda: {"version": 1}, lambda: True)
    port = server.socket.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger:
        begin = b"GET /healthz HTTP/1.1\r\na: "
        stranger.sendall(begin + b"x" * (endpoints._MAX_HEAD - len(begin)))
        with stranger.makefile("rb") as reply:
            assert reply.readline() == b"HTTP/1.1 200 OK\r\n"
            assert reply.read().endswith(b"ok\n")
    server.end()


def test_without_descriptors_it_waits_instead_of_trying_all_the_time(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sockets, "FULL_SECONDS", 600.0)
    tries: list[float] = []

    class Counted(endpoints.Server):
        def get_request(self) -> Any:
            tries.append(time.monotonic())
            return super().get_request()

    monkeypatch.setattr(endpoints, "Server", Counted)
    server = endpoints.serve(0, tmp_path, LauncherMetrics(), lambda: {"version": 1}, lambda: True)
    with socket.socket() as client:
        with none_left():
            client.connect(("127.0.0.1", server.socket.getsockname()[1]))
            while not tries:
                time.sleep(0.01)
            time.sleep(0.1)  # enough for thousands of tries
        assert len(tries) == 1
    server.end()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()


STATE: State = {
    "version": 1, "uid": "5c1e", "attempt": 2, "round": 1, "phase": "step", "step": 7,
    "rounds": [{"round": 0, "exception": "ValueError: password=x"}], "stacks": "in forward()",
    "proof": {"equal": True, "first": 3, "last": 4},
}  # fmt: skip
PRIVATE = {"uid", "rounds", "stacks", "proof"}


def test_strangers_are_told_neither_what_admits_them_to_the_hub_nor_stacks(tmp_path):  # type: ignore[no-untyped-def]
    server = endpoints.serve(0, tmp_path, LauncherMetrics(), lambda: STATE, lambda: True)
    port = server.socket.getsockname()[1]

    def ask(query: str) -> str:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/state{query}", timeout=PATIENCE
        ) as reply:
            return str(reply.read().decode())

    try:
        for query in ("", "?", "?uid=", "?UID=5c1e", "?x=5c1e"):
            told = json.loads(ask(query))
            assert told == {k: v for k, v in STATE.items() if k not in PRIVATE}, query
        assert json.loads(ask("?uid=5c1e")) == STATE
        for query in ("?uid=5c1", "?uid=5c1e0", "?uid=*", "?uid=%C3%BC", "?uid=other&uid=5c1e"):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                ask(query)
            assert (refusal.value.code, b"5c1e" in refusal.value.read()) == (409, False), query
    finally:
        server.end()


def test_without_a_job_there_is_no_uid_to_name() -> None:
    alone: State = {**STATE, "uid": ""}
    assert answer(alone, "") == alone
    assert answer(alone, "uid=5c1e") == alone
