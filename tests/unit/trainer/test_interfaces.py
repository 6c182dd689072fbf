"""gloo's interface on the host's network, where the host's name is a loopback address."""

from __future__ import annotations

import os
import socket

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
    monkeypatch.setattr(interfaces, "_address", {"lo": "127.0.0.1", "eth1": "10.0.0.7"}.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth1")])
    monkeypatch.delenv(interfaces.NAME, raising=False)
    return known


@pytest.mark.parametrize(
    ("node", "own", "expected"),
    [
        ("127.0.1.1", "10.0.0.7", "eth1"),  # Debian's /etc/hosts
        ("::1", "10.0.0.7", "eth1"),
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


def test_addresses_of_this_machine() -> None:
    assert interfaces._address("lo") == "127.0.0.1"
    assert interfaces._address("no such") is None
    assert interfaces._towards("127.0.0.1") == "127.0.0.1"
    assert interfaces._towards("no-such-host.invalid") is None
    if (own := interfaces._towards(FAR)) is not None:  # a machine that has a way out
        assert any(own == interfaces._address(name) for _, name in socket.if_nameindex())
