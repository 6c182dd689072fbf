"""The cache of nodes: since when each is silent, by which clock, and what a quorum said."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.core.nodes import Node
from ddpjob_operator.shell.nodes import NodeCache, slim

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clocks:
    """A monotonic clock, and a time of day that may jump."""

    def __init__(self) -> None:
        self.seconds, self.jump = 1000.0, timedelta()

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds - 1000) + self.jump


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def cache(clocks: Clocks) -> NodeCache:
    return NodeCache(clocks.monotonic, clocks.now)


def node(version: int, status: str = "True", *, since: float = 0, taint: str = "") -> Any:
    at = (START + timedelta(seconds=since)).isoformat()
    return slim(
        {
            "metadata": {"name": "a", "resourceVersion": str(version)},
            "spec": {"taints": [{"key": taint}] if taint else []},
            "status": {
                "conditions": [{"type": "Ready", "status": status, "lastTransitionTime": at}]
            },
        }
    )


def look(cache: NodeCache, name: str = "a") -> Node:
    nodes = cache.of([name])
    assert nodes is not None
    return nodes.known[name]


def test_nothing_is_known_before_the_first_list(cache: NodeCache) -> None:
    cache.put(node(3))
    assert cache.of(["a"]) is None


def test_silence_that_was_seen_is_measured_by_the_own_clock(
    cache: NodeCache, clocks: Clocks
) -> None:
    cache.replace_all([node(3)])
    clocks.seconds += 10
    clocks.jump = timedelta(hours=1)
    assert cache.put(node(4, "Unknown", since=-3600))
    clocks.seconds += 5
    assert not cache.put(node(5, "False")), "still not ready: no news, and the count goes on"
    clocks.seconds += 5
    assert look(cache).down_seconds == 10
    assert cache.put(node(6))
    assert (look(cache).ready, look(cache).down_seconds) == (True, 0)


@pytest.mark.parametrize(("since", "seconds"), [(-40, 40), (600, 0)])
def test_silence_older_than_the_process_is_the_clusters_word(
    cache: NodeCache, since: float, seconds: float
) -> None:
    cache.replace_all([node(3, "Unknown", since=since)])
    assert look(cache).down_seconds == seconds


def test_a_list_and_a_read_confirm_and_an_event_does_not(cache: NodeCache, clocks: Clocks) -> None:
    cache.replace_all([node(3)])
    clocks.seconds += 30
    cache.put(node(4, "Unknown"))
    assert look(cache).read_seconds == 30
    cache.put(node(4, "Unknown"), quorum=True)
    assert look(cache).read_seconds == 0


def test_an_older_event_changes_nothing_but_an_older_read_does(cache: NodeCache) -> None:
    cache.replace_all([node(9, "Unknown")])
    assert not cache.put(node(8))
    assert not look(cache).ready
    assert cache.put(node(8), quorum=True), "etcd was restored"
    assert look(cache).ready


def test_a_node_that_is_gone_counts_from_then_and_may_come_back(
    cache: NodeCache, clocks: Clocks
) -> None:
    cache.replace_all([node(3, "Unknown", since=-100)])
    assert cache.remove("a")
    clocks.seconds += 7
    assert not cache.remove("a", quorum=True)
    assert look(cache) == Node("a", exists=False, ready=False, down_seconds=7, read_seconds=0)
    assert cache.put(node(5))
    assert look(cache).ready


def test_a_pod_may_be_told_of_before_its_node(cache: NodeCache, clocks: Clocks) -> None:
    cache.replace_all([])
    assert not look(cache).exists
    clocks.seconds += 3
    assert look(cache) == Node("a", exists=False, ready=False, down_seconds=3)
    cache.put(node(3, "False", since=-100))
    assert look(cache).down_seconds == 103, "what it was before we knew it, the cluster tells"


def test_a_relist_finds_what_was_missed(cache: NodeCache) -> None:
    assert cache.replace_all([node(3)]) == ["a"]
    assert cache.replace_all([node(3)]) == []
    assert cache.replace_all([]) == ["a"]
    assert not look(cache).exists


@pytest.mark.parametrize(
    ("status", "taint", "ready"),
    [
        ("True", "", True),
        ("Unknown", "", False),
        ("True", "node-role.kubernetes.io/control-plane", False),
    ],
)
def test_a_control_plane_node_is_no_worker(
    cache: NodeCache, status: str, taint: str, ready: bool
) -> None:
    cache.replace_all([node(3, status, taint=taint)])
    nodes = cache.of([])
    assert nodes is not None
    assert nodes.any_ready is ready
    cache.forget()
    assert cache.of([]) is None
    cache.replace_all([])
    assert cache.of([]) is not None


def test_the_memory_of_nodes_that_are_gone_is_bounded(cache: NodeCache) -> None:
    cache.replace_all([])
    for number in range(2000):
        cache.remove(f"n{number}")
    assert len(cache._nodes) == 1000
    assert look(cache, "n1999").exists is False


def test_after_a_silence_of_all_nodes_each_has_its_time_to_come_back(
    cache: NodeCache, clocks: Clocks
) -> None:
    def other(version: int, status: str) -> Any:
        found, number = node(version, status)
        return replace(found, name="b"), number

    cache.replace_all([node(3), other(3, "True")])
    clocks.seconds += 10
    cache.put(other(4, "Unknown"))
    clocks.seconds += 10
    assert look(cache, "b").down_seconds == 10
    cache.put(node(5, "Unknown"))
    clocks.seconds += 300
    cache.put(node(6))  # the network is back, and b's kubelet a second later than a's
    assert look(cache, "b").down_seconds == 0
    clocks.seconds += 30
    assert look(cache, "b").down_seconds == 30
    cache.remove("b")
    clocks.seconds += 5
    assert look(cache, "b").down_seconds == 5
