"""The cache of nodes: since when each is silent, by which clock, and what a quorum said."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.core.objects.nodes import FORBIDDEN, Node, Nodes
from ddpjob_operator.shell import nodes as cached
from ddpjob_operator.shell.api import Forbidden, Listing
from ddpjob_operator.shell.nodes import NodeCache

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> NodeCache:
    return NodeCache(clock)


def seen(cache: NodeCache, *names: str) -> Nodes:
    nodes = cache.of(names)
    assert nodes is not None
    return nodes


class Leases:
    """An API server that lists Leases, in some seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.found, self.takes, self.allowed = clock, {"a": 1, "b": 1}, 0.0, True

    async def list_all(self, resource: Any, namespace: str, *, keep: Any) -> Listing:
        assert (resource.plural, namespace) == ("leases", "kube-node-lease")
        if not self.allowed:
            raise Forbidden(403, "Forbidden", "no")
        self.clock.seconds += self.takes
        found = self.found.items()
        objects = [{"metadata": {"name": n}, "spec": {"renewTime": t}} for n, t in found]
        return Listing([keep(one) for one in objects], "1")


async def test_a_lease_is_old_by_what_this_process_has_listed(clock, cache):
    """Never by its own time, which is the kubelet's."""
    api = Leases(clock)
    cache.replace_all([node(1)])
    assert seen(cache, "a").leases_seconds == math.inf

    async def after(seconds: float, **renewed: int) -> tuple[float, float]:
        clock.seconds += seconds
        api.found |= renewed
        await cache.read_leases(api)  # type: ignore[arg-type]
        found = seen(cache, "a").known["a"].lease
        return found.unrenewed, found.behind

    assert await after(0) == (0, 0)
    assert await after(15) == (15, 0), "nobody has renewed one: the control plane is away"
    assert await after(5, b=2) == (20, 0)
    assert await after(6, b=3) == (26, 6), "from the first that was"
    assert await after(1, a=2) == (0, 0)
    api.takes = 20.0
    assert await after(1, b=4) == (1, 0), "asked before the other one was listed"
    assert await after(5) == (26, 5)
    assert seen(cache, "a").leases_seconds == 20
    api.allowed = False
    assert await after(60) == (0, 0)


def node(version: int, status: str = "True", *, since: float = 0, taint: str = "") -> Any:
    at = (START + timedelta(seconds=since)).isoformat()
    return NodeCache().slim(
        {
            "metadata": {"name": "a", "resourceVersion": str(version)},
            "spec": {"taints": [{"key": taint}] if taint else []},
            "status": {
                "conditions": [{"type": "Ready", "status": status, "lastTransitionTime": at}]
            },
        }
    )


def look(cache: NodeCache) -> Node:
    return seen(cache, "a").known["a"]


def test_silence_is_measured_by_the_own_clock(cache, clock):
    cache.replace_all([node(3)])
    clock.seconds += 10
    assert cache.put(node(4, "Unknown", since=-3600))
    clock.seconds += 5
    assert not cache.put(node(5, "Unknown", since=-3600)), "no news, and the count goes on"
    clock.seconds += 5
    assert look(cache).down_seconds == 10
    assert cache.put(node(6))
    assert (look(cache).ready, look(cache).down_seconds) == (True, 0)


def test_a_node_that_was_ready_while_nobody_looked_counts_anew(cache, clock):
    cache.replace_all([node(3, "Unknown", since=0)])
    clock.seconds += 60
    assert not cache.put(node(9, "Unknown", since=50))
    assert look(cache).down_seconds == 0


def test_a_read_says_nothing_of_what_a_watch_tells_later(cache, clock):
    """A list of seconds ago, when the node was ready, is no word on its silence since."""
    cache.replace_all([node(3)])
    clock.seconds += 5
    assert look(cache).read_seconds == 5
    cache.put(node(4, "Unknown", since=1))
    assert look(cache).read_seconds is None
    cache.put(node(4, "Unknown", since=1), quorum=True)
    assert look(cache).read_seconds == 0
    clock.seconds += 1
    cache.put(node(5, "Unknown", since=1))
    assert look(cache).read_seconds == 1, "no news: the read still holds"
    cache.put(node(6, "Unknown", since=2))
    assert look(cache).read_seconds is None, "it was back in between"
    cache.put(node(7, "Unknown", since=2), quorum=True)
    cache.remove("a")
    assert look(cache).read_seconds is None
    cache.remove("a", quorum=True)
    assert look(cache).read_seconds == 0


def test_an_older_event_changes_nothing_but_an_older_read_does(cache):
    cache.replace_all([node(9, "Unknown")])
    assert not cache.put(node(8))
    assert not look(cache).ready
    assert cache.put(node(8), quorum=True), "etcd was restored"
    assert look(cache).ready


def test_a_node_that_is_gone_counts_from_then_and_may_come_back(cache, clock, monkeypatch):
    cache.replace_all([node(3, "Unknown", since=-100)])
    assert cache.remove("a")
    clock.seconds += 7
    assert not cache.remove("a", quorum=True)
    assert look(cache) == Node("a", exists=False, ready=False, down_seconds=7, read_seconds=0)
    assert cache.put(node(5))
    assert look(cache).ready
    monkeypatch.setattr(cached, "_REMEMBERED", 2)
    assert [cache.remove(name) for name in "bcddcb"] == [True] * 3 + [False] * 2 + [True]


def test_a_pod_may_be_told_of_before_its_node(cache, clock):
    cache.replace_all([])
    assert not look(cache).exists
    clock.seconds += 3
    found = Node("a", exists=False, ready=False, down_seconds=3)
    assert look(cache) == replace(found, guessed=True)
    assert cache.replace_all([]) == ["a"], "a list without it is a word"
    assert look(cache) == found
    cache.put(node(3, "False", since=-100))
    assert look(cache).down_seconds == 0


def test_a_control_plane_node_is_no_worker(cache):
    cache.replace_all([node(3)])
    assert not seen(cache).disrupted
    cache.replace_all([node(4, "Unknown")])
    assert seen(cache).disrupted
    cache.replace_all([node(5, taint="node-role.kubernetes.io/control-plane")])
    assert seen(cache).disrupted
    cache.forget()
    assert cache.of([]) == FORBIDDEN
    cache.replace_all([])
    assert cache.of([]) is not None


def test_after_a_silence_of_most_nodes_their_calm_begins_anew(cache, clock):
    def called(name: str, version: int, status: str = "True") -> Any:
        found, number = node(version, status)
        return replace(found, name=name), number

    def calm() -> float:
        nodes = seen(cache)
        return 0.0 if nodes.disrupted else nodes.calm_seconds

    cache.replace_all([called(name, 3) for name in "abcde"])
    assert calm() == math.inf
    cache.put(called("a", 4, "Unknown"))
    cache.put(called("b", 5, "Unknown"))
    assert calm() == math.inf, "two of five"
    clock.seconds += 10
    cache.put(called("c", 6, "Unknown"))
    assert calm() == 0
    clock.seconds += 300
    cache.put(called("a", 7))  # the network is back, and b's kubelet a second later than a's
    clock.seconds += 1
    assert calm() == 1
    cache.remove("c")
    clock.seconds += 4
    assert calm() == 5, "what is gone is no silent worker"
