"""The launcher's HTTP port: neither a resolver nor its end keeps the supervisor waiting."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from ddpjob_trainer.launcher import endpoints
from ddpjob_trainer.launcher.metrics import LauncherMetrics


def test_it_serves_without_a_resolver_and_frees_its_port_at_the_end(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    def resolve(*_: object) -> str:
        pytest.fail("asks for a name")

    monkeypatch.setattr(socket, "getfqdn", resolve)
    monkeypatch.setattr(socket, "gethostbyaddr", resolve)
    server = endpoints.serve(
        0, lambda: tmp_path, LauncherMetrics(), lambda: {"version": 1}, lambda: True
    )
    port = server.socket.getsockname()[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as reply:
        assert reply.read() == b"ok\n"
    server.end()
    server.thread.join(20)
    assert not server.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
