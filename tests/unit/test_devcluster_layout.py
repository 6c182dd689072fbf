"""The devcluster's names and addresses: apart for every index, short enough for the kernel."""

from __future__ import annotations

import ipaddress
from itertools import combinations
from pathlib import Path

import pytest

from devcluster.failure import Failure
from devcluster.layout import (
    MAX_INDEX,
    MAX_NODES,
    SERVICE_NETWORK,
    Layout,
    check_name,
    free_index,
)

EVERY = [Layout(f"c{index}", index, Path("/state")) for index in range(MAX_INDEX + 1)]


def networks(layout: Layout) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(one) for one in (layout.node_network, layout.pod_network)]


def test_no_two_clusters_share_an_address() -> None:
    for one, other in combinations(EVERY, 2):
        assert not any(a.overlaps(b) for a in networks(one) for b in networks(other))
        assert one.loopback != other.loopback


def test_no_cluster_overlaps_the_service_network() -> None:
    services = ipaddress.IPv4Network(SERVICE_NETWORK)
    assert not any(net.overlaps(services) for layout in EVERY for net in networks(layout))


def test_node_addresses_lie_in_their_cluster_and_differ() -> None:
    layout = EVERY[-1]
    nodes = [layout.node(number) for number in range(1, MAX_NODES + 1)]
    node_net, pod_net = networks(layout)
    assert all(ipaddress.IPv4Address(node.address) in node_net for node in nodes)
    assert all(ipaddress.IPv4Network(node.pod_network).subnet_of(pod_net) for node in nodes)
    assert len({node.address for node in nodes} | {layout.gateway}) == MAX_NODES + 1
    assert len({node.pod_network for node in nodes}) == MAX_NODES


def test_link_names_fit_the_kernel() -> None:
    node = EVERY[-1].node(MAX_NODES)
    assert len(f"{node.link}p") <= 15


@pytest.mark.parametrize("number", [0, MAX_NODES + 1])
def test_a_node_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(Failure, match=f"node {number}"):
        EVERY[0].node(number)


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a/b", "..", "a" * 21, "x y", "a\n"])
def test_a_name_unfit_for_a_path_is_refused(name: str) -> None:
    with pytest.raises(Failure, match="--name"):
        check_name(name, Path("/var/lib/devcluster"))


@pytest.mark.parametrize("name", ["dev", "t-residue", "a", "a" * 20])
def test_a_plain_name_is_taken(name: str) -> None:
    check_name(name, Path("/var/lib/devcluster"))


def test_a_home_too_deep_for_sockets_is_refused() -> None:
    with pytest.raises(Failure, match="DEVCLUSTER_HOME"):
        check_name("dev", Path("/" + "d" * 80))


def test_the_lowest_free_index_is_taken() -> None:
    assert free_index(set(), []) == 0
    assert free_index({0, 2}, []) == 1


@pytest.mark.parametrize("route", ["10.89.0.0/24", "10.89.0.5", "10.128.0.0/16", "10.128.3.0/24"])
def test_an_index_whose_subnets_the_host_routes_elsewhere_is_passed_over(route: str) -> None:
    assert free_index(set(), [route]) == 1


def test_a_wide_route_such_as_of_a_vpn_gives_way() -> None:
    assert free_index(set(), ["10.0.0.0/8", "0.0.0.0/1"]) == 0
    assert free_index(set(), ["10.128.0.0/12"]) == 16


def test_all_indices_may_be_taken() -> None:
    with pytest.raises(Failure, match="taken"):
        free_index(set(range(MAX_INDEX + 1)), [])


@pytest.mark.parametrize("home", ["/a b", "/a,b", "/a:b", "/a'b", '/a"b', "/a\\b"])
def test_a_home_that_configuration_files_would_misread_is_refused(home: str) -> None:
    with pytest.raises(Failure, match="DEVCLUSTER_HOME"):
        check_name("dev", Path(home))


def test_the_cgroup_goes_by_the_state_directory() -> None:
    here, there = (Layout("dev", 0, Path(home) / "dev") for home in ("/a", "/b"))
    assert here.cgroup != there.cgroup
    assert here.cgroup == Layout("dev", 5, here.state).cgroup
