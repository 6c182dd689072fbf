"""What the ranks tell one another, by the store and the interface that they meet at."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from ddpjob_trainer.comm import rendezvous
from ddpjob_trainer.comm.world import Sent, World, send
from ddpjob_trainer.errors import PeerLostError
from support.launching import free_ports


def test_each_name_gets_its_own_sums_and_may_ask_twice():
    world = World(0, 1, torch.device("cpu"), None, None, None)  # type: ignore[arg-type]
    sent = send(world, {"a": [1.0, 2.0], "none": [], "b": [3.0]}, measured={"b"})
    assert sent.host.sums == sent.device.sums == {"a": [1.0, 2.0], "none": [], "b": [3.0]}
    assert sent.host.sums == sent.host.sums
    later = send(world, {"a": [5.0]})
    assert later.host.sums == {"a": [5.0]}
    assert sent.host.sums["a"] == [1.0, 2.0], "a step is heard when the next one is under way"


class Rank(World):
    """One of three in this process; they meet where they agree whether all can listen."""

    met = threading.Barrier(3)
    said: ClassVar[dict[int, float]] = {}

    def sum(self, values: Sequence[float]) -> list[float]:
        self.said[self.rank] = values[0]
        self.met.wait()
        return [sum(self.said.values())]


def linked(directory: Path) -> list[World]:
    """Return the ranks of one launcher."""
    ranks = [Rank(n, 3, torch.device("cpu"), None, object(), None) for n in range(3)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda rank: rendezvous._link(rank, directory), ranks)
        for rank, links in zip(ranks, found, strict=True):
            rank.links = links
    return [*ranks]


def test_ranks_of_one_launcher_hear_one_another_and_who_is_gone(tmp_path):
    ranks = linked(tmp_path)

    def all_send(number: float) -> list[Sent]:
        return [send(rank, {"a": [number], "b": [0.5, -1.0]}) for rank in ranks]

    for number in (1.0, 2.0):
        for one in all_send(number):
            assert one.host.sums == {"a": [3 * number], "b": [1.5, -3.0]}
    first, *others = all_send(3.0)
    assert first.host.sums["a"] == [9.0]
    ranks.pop(0).links = None  # it ends, and what it has said counts
    for one in others:
        assert one.host.sums["a"] == [9.0]
    for rank in ranks:
        assert rank.links is not None
        with pytest.raises(ConnectionError, match="closed by peer"):
            rank.links.sums([4.0])
        with pytest.raises(PeerLostError, match="Broken pipe"):
            send(rank, {"a": [4.0]})


def test_numbers_of_ranks_that_sent_more_or_fewer_are_not_added_up(tmp_path):
    counts = (2, 1, 1)
    sent = [send(rank, {"a": [1.0] * n}) for rank, n in zip(linked(tmp_path), counts, strict=True)]
    for one in sent:
        with pytest.raises(ValueError, match=r"multiple of item size|shorter than"):
            _ = one.host.sums


def test_where_one_rank_cannot_listen_all_talk_by_gloo(tmp_path):
    (tmp_path / "rank-1.link").mkdir()
    assert [rank.links for rank in linked(tmp_path)] == [None] * 3
    (tmp_path / "rank-1.link").rmdir()
    assert None not in [rank.links for rank in linked(tmp_path)], "an earlier run's are replaced"


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "channels_last": lambda: torch.ones(8, 4, 1, 1).to(memory_format=torch.channels_last),
    "channels_last of more": lambda: torch.ones(8, 4, 3, 3).to(memory_format=torch.channels_last),
    "an element of a table": lambda: torch.ones(3, 2)[:1, 0],
    "transposed": lambda: torch.ones(3, 2).T,
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_is_overwritten_however_its_elements_lie(monkeypatch, layout):
    tensor = LAYOUTS[layout]()
    sent = torch.arange(float(tensor.numel())).to(tensor.dtype)

    def broadcast(flat: torch.Tensor, source: int, group: object) -> None:
        flat.copy_(sent.view(torch.uint8))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    world = World(1, 2, torch.device("cpu"), None, None, None)  # type: ignore[arg-type]
    world.broadcast_tensor(tensor)
    assert tensor.flatten().tolist() == sent.tolist()


def test_the_store_of_a_torch_without_libuv_as_debians(monkeypatch):
    made, tries = rendezvous.TCPStore, []

    def built_without(*where: Any, use_libuv: bool = True, **options: Any) -> Any:
        tries.append(where)
        if where[1] == 1:
            raise RuntimeError("EADDRINUSE")
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv, ...")
        return made(*where, use_libuv=False, **options)

    monkeypatch.setattr(rendezvous, "TCPStore", built_without)
    [port] = free_ports(1)
    server, client = (rendezvous._store("localhost", port, is_master=it) for it in (True, False))
    client.set("key", "value")
    assert server.get("key") == b"value"
    tries.clear()
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        rendezvous._store("localhost", 1, is_master=True)
    assert len(tries) == 1, "another refusal"


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
def test_the_interface_on_the_way_to_rank_0(given, node, own, expected, monkeypatch):
    def looked_up(host: str, port: None) -> list[tuple[object, ...]]:
        if node is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (node, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(rendezvous, "_address", {"lo": "127.0.0.1", "eth1": "10.0.0.7"}.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth1")])
    monkeypatch.setattr(rendezvous, "_towards", lambda master: own)
    monkeypatch.setattr(os, "environ", {rendezvous.INTERFACE: given} if given else {})
    rendezvous.choose_interface("master")
    assert os.environ.get(rendezvous.INTERFACE) == expected
