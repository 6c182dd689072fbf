"""The store that ranks meet at, in a torch that was built without libuv, as Debian's is."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob_trainer.comm import rendezvous
from support.launching import free_ports

WITHOUT = "use_libuv was requested but PyTorch was built without libuv support, run with ..."


def test_a_torch_without_libuv_has_a_store_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rendezvous.TCPStore

    def built_without(*where: Any, use_libuv: bool = True, **options: Any) -> Any:
        if use_libuv:
            raise RuntimeError(WITHOUT)
        return made(*where, use_libuv=False, **options)

    monkeypatch.setattr(rendezvous, "TCPStore", built_without)
    [port] = free_ports(1)
    server = rendezvous._store("localhost", port, is_master=True)
    client = rendezvous._store("localhost", port, is_master=False)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_another_refusal_of_the_store_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refused(*where: Any, **options: Any) -> None:
        tries.append(options)
        raise RuntimeError("EADDRINUSE")

    monkeypatch.setattr(rendezvous, "TCPStore", refused)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        rendezvous._store("localhost", 1, is_master=True)
    assert len(tries) == 1
