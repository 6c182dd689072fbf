"""gloo's interface on the host's network, where the host's name is a loopback address."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ddpjob_trainer.comm import interfaces

#: Of a documentation network: nothing is sent, so nothing need be there.
FAR = "192.0.2.1"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name -> address, for all that is looked up."""
    known: dict[str, str] = {}

    def looked_up(host: str, port: None, **more: int) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, more["type"], 0, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    addresses = {"lo": {"127.0.0.1", "::1"}, "eth1": {"10.0.0.7", "fd00::7"}}
    monkeypatch.setattr(interfaces, "_addresses", lambda name: addresses.get(name, set()))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth1")])
    monkeypatch.delenv(interfaces.NAME, raising=False)
    return known


@pytest.mark.parametrize(
    ("node", "own", "expected"),
    [
        ("127.0.1.1", "10.0.0.7", "eth1"),  # Debian's /etc/hosts
        ("::1", "10.0.0.7", "eth1"),
        ("127.0.1.1", "fd00::7", "eth1"),  # a cluster of IPv6
        (None, "10.0.0.7", "eth1"),  # nobody knows the name: gloo takes the loopback
        ("10.0.0.7", "10.0.0.7", None),  # gloo finds it
        ("127.0.1.1", "127.0.0.1", None),  # all ranks are here
        ("127.0.1.1", "10.0.0.8", None),  # no interface has it
        ("127.0.1.1", None, None),  # no way there
    ],
)
def test_the_interface_on_the_way_to_rank_0(
    node: str | None, own: str | None, expected: str | None,
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if node is not None:
        names["node1"] = node
    monkeypatch.setattr(interfaces, "_towards", lambda master: own)
    interfaces.choose("master")
    assert os.environ.pop(interfaces.NAME, None) == expected


def test_what_is_set_is_kept(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interfaces.NAME, "ib0")
    interfaces.choose("master")
    assert os.environ[interfaces.NAME] == "ib0"


def test_addresses_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    monkeypatch.setattr(interfaces, "_IPV6_ADDRESSES", table)
    assert interfaces._addresses("lo") == {"127.0.0.1"}  # a kernel without IPv6
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000006000000000000000000000010 02 40 00 80     eth0\n"
        "fe80000000000000d8127bfffe3a1c05 02 40 20 80     eth0\n"
    )
    assert interfaces._addresses("lo") == {"127.0.0.1", "::1"}
    assert interfaces._addresses("eth0") >= {"fd00:6::10", "fe80::d812:7bff:fe3a:1c05"}
    assert interfaces._addresses("no such") == set()
    assert interfaces._towards("127.0.0.1") == "127.0.0.1"
    assert interfaces._towards("no-such-host.invalid") is None
    if (own := interfaces._towards(FAR)) is not None:  # a machine that has a way out
        assert any(own in interfaces._addresses(name) for _, name in socket.if_nameindex())
