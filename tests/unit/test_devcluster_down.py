"""What a slow kernel takes a minute for is waited for: processes that die, cgroups that empty."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from devcluster import cgroups, cluster, host, lifecycle, machine, network, process
from devcluster.cgroups import Hierarchy
from devcluster.cluster import Cluster
from devcluster.layout import Layout
from devcluster.process import Identity

ONE = Identity(1, 1, "this")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes end a minute after SIGKILL."""

    def end(identities: Iterable[Identity], seconds: float, polite: bool) -> list[Identity]:
        return [] if seconds > 60 else list(identities)

    monkeypatch.setattr(process, "end", end)


def nothing(*_: object) -> None:
    pass


@pytest.mark.usefixtures("slow")
def test_a_node_that_dies_slowly_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "disconnect", nothing)
    monkeypatch.setattr(cgroups, "remove", nothing)
    this = Cluster(Layout("slow", 0, tmp_path), 1)
    name = machine.init_name(this.members[0])
    this.register.write(name, ONE)
    machine.power_off(this, this.members[0])
    assert this.register.read(name) is None


@pytest.mark.usefixtures("slow")
def test_down_waits_for_all_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("DEVCLUSTER_HOME", str(tmp_path))
    monkeypatch.setattr(host, "require_root", nothing)
    monkeypatch.setattr(cluster, "hold", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "strays", lambda _: [ONE])
    monkeypatch.setattr(lifecycle, "_find", nothing)
    monkeypatch.setattr(cgroups, "remove", nothing)
    lifecycle.down("slow", said.append)
    assert "cluster slow is gone" in said[-1]


def test_a_cgroup_that_empties_slowly_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, clock = iter([False, False, True]), itertools.count(0, 30)
    time = SimpleNamespace(monotonic=clock.__next__, sleep=nothing)
    monkeypatch.setattr(cgroups, "time", time)
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [Hierarchy(tmp_path, "cgroup2", "")])
    monkeypatch.setattr(cgroups, "_remove_tree", lambda _: next(looks))
    cgroups.remove("devcluster-slow")
    assert not [*looks]
