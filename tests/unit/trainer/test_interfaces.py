"""gloo's interface on the host's network, where the host's name is a loopback address."""

from __future__ import annotations

import os
import socket

import pytest

from ddpjob_trainer.comm import interfaces


@pytest.mark.parametrize(
    ("given", "node", "own", "expected"),
    [
        ("", "127.0.1.1", "10.0.0.7", "eth1"),  # Debian's /etc/hosts
        ("", "::1", "10.0.0.7", "eth1"),
        ("", None, "10.0.0.7", "eth1"),  # nobody knows the name: gloo takes the loopback
        ("", "10.0.0.7", "10.0.0.7", None),  # gloo finds it
        ("", "127.0.1.1", "127.0.0.1", None),  # all ranks are here
        ("", "127.0.1.1", "10.0.0.8", None),  # no interface has it
        ("", "127.0.1.1", "", None),  # no way there
        ("ib0", "127.0.1.1", "10.0.0.7", "ib0"),
    ],
)
def test_the_interface_on_the_way_to_rank_0(
    given: str, node: str | None, own: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(host: str, port: None) -> list[tuple[object, ...]]:
        if node is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (node, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(interfaces, "_address", {"lo": "127.0.0.1", "eth1": "10.0.0.7"}.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth1")])
    monkeypatch.setattr(interfaces, "_towards", lambda master: own)
    monkeypatch.setattr(os, "environ", {interfaces.NAME: given} if given else {})
    interfaces.choose("master")
    assert os.environ.get(interfaces.NAME) == expected


def test_addresses_of_this_machine() -> None:
    assert interfaces._address("lo") == "127.0.0.1"
    assert interfaces._address("no such") is None
    assert interfaces._towards("127.0.0.1") == "127.0.0.1"
    assert interfaces._towards("no-such-host.invalid") == ""
    if own := interfaces._towards("192.0.2.1"):  # of a documentation network: nothing is sent
        assert any(own == interfaces._address(name) for _, name in socket.if_nameindex())
