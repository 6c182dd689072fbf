"""Ports that a launcher finds for others: nobody holds them, and nobody is given them meanwhile."""

import socket

import pytest

from ddpjob_trainer.launcher import host
from support.launching import has_address


def test_each_is_another_and_none_is_handed_out_by_the_kernel():
    found = host.free_ports(200)
    assert len(set(found)) == 200
    assert max(found) < 20_000  # the operator's begin there, Linux' own at 32,768
    assert found != host.free_ports(200)


@pytest.mark.parametrize("address", ["::", "127.0.0.1"])
@pytest.mark.parametrize("listens", [True, False])
def test_what_another_holds_is_taken_though_it_does_not_listen_yet(monkeypatch, listens, address):
    if not has_address(address):
        pytest.skip(f"this machine has no {address}")
    first, _ = two = host.free_ports(2)
    monkeypatch.setattr(host, "_QUIET", two)
    assert sorted(host.free_ports(2)) == sorted(two), "as many as there are"
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, first))
        if listens:
            held.listen()
        with pytest.raises(OSError, match=r"fewer than 2 free ports"):
            host.free_ports(2)
