"""The launcher's HTTP port: neither a resolver nor its end keeps the supervisor waiting."""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from ddpjob_contract import State
from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.reports import endpoints
from ddpjob_trainer.launcher.reports.endpoints import LauncherMetrics, Server, as_text
from ddpjob_trainer.launcher.reports.state import answer
from support.descriptors import none_left
from support.patience import PATIENCE


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(endpoints, "_IDLE_SECONDS", 2 * PATIENCE)
    servers: list[Server] = []

    def begin(state: State | None = None) -> Server:
        said = state or {"version": 1}
        servers.append(endpoints.serve(0, tmp_path, LauncherMetrics(), said.copy, lambda: True))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


def port_of(server: Server) -> int:
    return int(server.socket.getsockname()[1])


def ask(server: Server, path: str) -> bytes:
    url = f"http://127.0.0.1:{port_of(server)}{path}"
    with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
        return bytes(reply.read())


def test_it_serves_without_a_resolver_and_frees_its_port_at_the_end(serve, monkeypatch):
    for name in ("getfqdn", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, lambda *_: pytest.fail("asks for a name"))
    server = serve()
    assert ask(server, "/healthz") == b"ok\n"
    port = port_of(server)
    server.end()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_strangers_who_connect_and_say_nothing_make_room_for_others(serve):
    """Else they hold the descriptors that the next round needs."""
    server = serve()
    address = ("127.0.0.1", port_of(server))
    silent = [socket.create_connection(address, timeout=PATIENCE) for _ in range(40)]
    assert ask(server, "/healthz") == b"ok\n"
    assert silent[0].recv(1) == b""
    assert len(server._connections) <= endpoints._MAX_CONNECTIONS
    for one in silent:
        one.close()


def test_an_endless_request_is_answered_and_closed_before_memory_fills(serve):
    address = ("127.0.0.1", port_of(serve()))
    with socket.create_connection(address, timeout=PATIENCE) as stranger:
        begin = b"GET /healthz HTTP/1.1\r\na: "
        stranger.sendall(begin + b"x" * (endpoints._MAX_HEAD - len(begin)))
        with stranger.makefile("rb") as reply:
            assert reply.readline() == b"HTTP/1.1 200 OK\r\n"
            assert reply.read().endswith(b"ok\n")


def test_without_descriptors_it_waits_instead_of_trying_all_the_time(serve, monkeypatch):
    monkeypatch.setattr(host, "FULL_SECONDS", 600.0)
    tries: list[float] = []

    class Counted(Server):
        def get_request(self) -> Any:
            tries.append(time.monotonic())
            return super().get_request()

    monkeypatch.setattr(endpoints, "Server", Counted)
    server = serve()
    with socket.socket() as client:
        with none_left():
            client.connect(("127.0.0.1", port_of(server)))
            while not tries:
                time.sleep(0.01)
            time.sleep(0.1)  # enough for thousands of tries
        assert len(tries) == 1
    server.end()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()


def test_a_file_that_vanishes_meanwhile_hides_no_metrics(tmp_path, monkeypatch):
    """That of a rank which ends; or it is half written as yet."""
    (tmp_path / "gauge_1.db").touch()
    real, looks = Path.stat, list[Path]()

    def stat(path: Path, **how: bool) -> os.stat_result:
        looks.extend([path] * (path.suffix == ".db"))
        return real(path / "gone" if path in looks[:2] and len(looks) < 3 else path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    assert b"ddpjob_trainer_round 3.0" in as_text(tmp_path, LauncherMetrics(round=3))


STATE: State = {
    "version": 1, "uid": "5c1e", "attempt": 2, "round": 1, "phase": "step", "step": 7,
    "rounds": [{"round": 0, "exception": "ValueError: password=x"}], "stacks": "in forward()",
    "proof": {"equal": True, "first": 3, "last": 4},
}  # fmt: skip
PRIVATE = {"uid", "rounds", "stacks", "proof"}


def test_strangers_are_told_neither_what_admits_them_to_the_hub_nor_stacks(serve):
    server = serve(STATE)
    for query in ("", "?", "?uid=", "?UID=5c1e", "?x=5c1e"):
        told = json.loads(ask(server, f"/state{query}"))
        assert told == {k: v for k, v in STATE.items() if k not in PRIVATE}, query
    assert json.loads(ask(server, "/state?uid=5c1e")) == STATE
    for query in ("?uid=5c1", "?uid=5c1e0", "?uid=*", "?uid=%C3%BC", "?uid=other&uid=5c1e"):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            ask(server, f"/state{query}")
        assert (refusal.value.code, b"5c1e" in refusal.value.read()) == (409, False), query
    alone: State = {**STATE, "uid": ""}  # there is no job, and no uid to name
    for query in ("", "uid=5c1e"):
        assert answer(alone, query, local=True) == alone
        assert answer(alone, query, local=False) == {
            k: v for k, v in alone.items() if k not in PRIVATE
        }
    assert answer(STATE, "", local=True) != STATE, "a pod's neighbours on the host's network"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_only_this_machines_addresses_are_local(host):
    assert endpoints._is_local(host)
    for other in ("10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "::", "0.0.0.0"):
        assert not endpoints._is_local(other)


def test_strangers_have_answers_made_once_a_second_at_most(serve, monkeypatch):
    monkeypatch.setattr(endpoints, "_KEPT_SECONDS", 2 * PATIENCE)
    made: list[str] = []

    def text(*_: object) -> bytes:
        made.append("metrics")
        return b"x 1\n"

    monkeypatch.setattr(endpoints, "as_text", text)
    server = serve(STATE)
    with futures.ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: ask(server, "/metrics"), range(16))) == {b"x 1\n"}
    assert made == ["metrics"]
    said = {**STATE}
    server = serve(said)
    before = ask(server, "/state")
    said["step"] = 8
    assert ask(server, "/state") == before
    assert json.loads(ask(server, "/state?uid=5c1e")) == said, "who names the uid is no stranger"
