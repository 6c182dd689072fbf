"""The devcluster leaves a machine as it is: files, processes, links and services of others."""

import ipaddress
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from devcluster import Failure, binaries, cluster
from devcluster.cli import main
from devcluster.cluster import Cluster, Wanted
from devcluster.layout import MAX_INDEX, MAX_NODES, SERVICE_NETWORK, Layout
from devcluster.node import network, volumes


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DDPJOB_CACHE", str(tmp_path / "cache"))
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be too long for sockets
        monkeypatch.setenv("DEVCLUSTER_HOME", f"{folder}/home")
        yield Path(folder, "home")


@pytest.mark.parametrize(
    ("words", "user", "says"),
    [
        (["status"], 0, "`devcluster --name nobody up`"),
        (["load", "an-image"], 0, "`devcluster --name nobody up`"),
        (["kubectl", "get", "nodes"], 0, "`devcluster --name nobody up`"),
        (["kueue"], 0, "`devcluster --name nobody up`"),
        (["kueue"], 1000, "devcluster needs root"),
        (["up"], 1000, "devcluster needs root"),
        (["down"], 1000, "devcluster needs root"),
        (["node", "stop", "1"], 1000, "devcluster needs root"),
        (["build"], 0, "No space left"),
        (["--name", "../kept", "down"], 0, "--name"),
    ],
)
def test_what_it_refuses_is_one_line_with_the_cure(words, user, says, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/x")

    def went_on(*_: object) -> None:
        raise AssertionError("it went on")

    for step in ("host.require_space", "cluster.hold", "cluster.require") if user else ():
        monkeypatch.setattr(f"devcluster.{step}", went_on)
    monkeypatch.setattr(binaries, "toolbox", full)
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert main(["--name", "nobody", *words]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert says in shown.err


def test_a_cluster_is_read_back_grows_and_a_damaged_record_is_named(home, capsys):
    made = Cluster(Layout("one", 7, home / "one"), 3, 5, gang_scheduling=True)
    made.save()
    assert cluster.load("one") == made
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "one\n"
    assert made.changed(Wanted()) == made
    assert made.changed(Wanted(4, 0, gang_scheduling=False)) == Cluster(made.layout, 4)
    with pytest.raises(Failure, match=r"--nodes 1: .*down"):
        made.changed(Wanted(nodes=1))
    (home / "one" / "cluster.json").write_text("{}")
    with pytest.raises(Failure, match=r"one/cluster\.json is damaged"):
        cluster.load("one")


def test_only_a_directory_with_a_record_even_a_torn_one_is_ours(home, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "index_of", lambda _: None)  # no link of this machine counts
    (home / "empty").mkdir(parents=True)
    cluster.require_own(home / "empty")
    torn = '{"name": "on'
    for number, (file, text, ours) in enumerate(
        [("notes", "", False), ("cluster.json", "{}", False),
         ("cluster.json", torn, True), (".cluster.77", torn, True)]
    ):  # fmt: skip
        folder = home / str(number)
        folder.mkdir()
        (folder / file).write_text(text)
        if ours:
            cluster.require_own(folder)
            continue
        with pytest.raises(Failure, match=r"is no cluster's"):
            cluster.require_own(folder)
    Cluster(Layout("one", 7, tmp_path / "far"), 3).save()
    (home / "one").symlink_to(tmp_path / "far")
    with pytest.raises(Failure, match=r"is no cluster's"):
        cluster.require_own(home / "one")


def test_only_our_released_volumes_are_removed():
    def volume(phase: str, by: str) -> dict[str, Any]:
        annotations = {"pv.kubernetes.io/provisioned-by": by}
        return {"metadata": {"annotations": annotations}, "status": {"phase": phase}}

    assert volumes.is_released(volume("Released", volumes.PROVISIONER))
    assert not volumes.is_released(volume("Bound", volumes.PROVISIONER))
    assert not volumes.is_released(volume("Released", "another"))


def test_no_two_clusters_share_an_address_and_each_name_fits_the_kernel():
    every = [Layout(f"c{index}", index, Path("/state")) for index in range(MAX_INDEX + 1)]
    used = [[ipaddress.IPv4Network(SERVICE_NETWORK)]]
    used += [
        [ipaddress.IPv4Network(n) for n in (one.node_network, one.pod_network)] for one in every
    ]
    for some, others in combinations(used, 2):
        assert not any(a.overlaps(b) for a in some for b in others)
    assert len({one.loopback for one in every}) == len(every)
    nodes = [every[-1].node(number) for number in range(1, MAX_NODES + 1)]
    node_net, pod_net = used[-1]
    assert all(ipaddress.IPv4Address(node.address) in node_net for node in nodes)
    assert all(ipaddress.IPv4Network(node.pod_network).subnet_of(pod_net) for node in nodes)
    assert len({node.address for node in nodes} | {every[-1].gateway}) == MAX_NODES + 1
    assert len({node.pod_network for node in nodes}) == MAX_NODES
    assert len(f"{nodes[-1].link}p") <= 15
    for number in (0, MAX_NODES + 1):
        with pytest.raises(Failure, match=f"node {number}"):
            every[0].node(number)


def test_a_link_is_told_from_another_clusters():
    layout = Layout("one", 3, Path("/s/one"))
    for link, bridge_is_ours, own in (
        ({"ifalias": "devcluster /s/one"}, False, True),
        ({"ifalias": "devcluster /t/one", "master": "dc3"}, True, False),
        ({"ifalias": "devcluster /t/one"}, True, False),
        ({"master": "dc3"}, True, True),
        ({"master": "dc3"}, False, False),
        ({"master": "br0"}, True, False),
        ({}, False, True),
    ):
        assert network.is_own(layout, link, bridge_is_ours) is own, link
