"""Ports that a launcher finds for others: nobody holds them, and nobody is given them meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddpjob_trainer.launcher import sockets


def test_each_is_another_and_none_is_handed_out_by_the_kernel() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = sockets.free_ports(200)
    assert len(set(found)) == 200
    assert max(found) < low


@pytest.mark.parametrize("listens", [True, False])
def test_what_another_holds_is_taken_though_it_does_not_listen_yet(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    first, second = sorted(sockets.free_ports(2))
    monkeypatch.setattr(sockets, "_QUIET", range(first, second + 1, second - first))
    with sockets.bind(first) as held:
        if listens:
            held.listen()
        assert sockets.free_ports(1) == [second]
        with pytest.raises(OSError, match="fewer than 2 free ports"):
            sockets.free_ports(2)
    with socket.socket() as other:
        other.bind(("", sockets.free_ports(1)[0]))
