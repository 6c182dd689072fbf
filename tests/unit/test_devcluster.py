"""The devcluster leaves a machine as it is: files, processes, links and services of others."""

import ipaddress
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from devcluster import Failure, binaries, cluster, process
from devcluster.cli import main
from devcluster.cluster import Cluster, Wanted
from devcluster.layout import MAX_INDEX, MAX_NODES, SERVICE_NETWORK, Layout, check_name, free_index
from devcluster.node import network, volumes
from support.cluster import wait_for
from support.patience import PATIENCE


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


def test_names_and_homes_that_a_path_or_a_socket_would_misread_are_refused():
    usual = Path("/var/lib/devcluster")
    for name in ("dev", "t-residue", "a", "a" * 20):
        check_name(name, usual)
    odd = ("", "-a", "a-", "A", "a_b", "a/b", "..", "../kept", "/kept", "a" * 21, "x y", "a\n")
    for name in odd:
        with pytest.raises(Failure, match="--name"):
            check_name(name, usual)
    for place in ("/a b", "/a,b", "/a:b", "/a'b", '/a"b', "/a\\b", "/" + "d" * 80):
        with pytest.raises(Failure, match="DEVCLUSTER_HOME"):
            check_name("dev", Path(place))


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


def test_the_record_outlives_what_cannot_be_removed(home, monkeypatch):
    Cluster(Layout("one", 7, home / "one"), 3).save()
    (home / "one" / "log").mkdir()
    inside = sorted((home / "one").iterdir())  # the record first, in whatever order it is listed
    monkeypatch.setattr(Path, "glob", lambda *_: inside)
    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Failure, match="one/log could not be removed"):
            cluster.remove_state(home / "one")
    assert cluster.load("one") is not None
    Cluster(Layout("two", 8, home / "two"), 3).save()
    cluster.remove_state(home / "one")
    assert cluster.load("two") is not None
    cluster.remove_state(home / "two")
    assert list(home.iterdir()) == []  # the home itself stays, as it is not the usual one
    monkeypatch.setattr(cluster, "_HOME", home)
    Cluster(Layout("one", 7, home / "one"), 3).save()
    cluster.remove_state(home / "one")
    assert not home.exists()


def test_mounts_at_and_below_a_directory_are_found():
    text = "\n".join(
        f"{number} 27 0:21 / {where} rw shared:1 - ext4 /dev/vda rw"
        for number, where in enumerate(["/", "/s/one", "/s/one/a\\040b", "/s/ones", "/s"])
    )
    found = cluster.mounts_below(Path("/s/one"), text)
    assert found == [Path("/s/one"), Path("/s/one/a b")]


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


def test_an_index_that_is_taken_or_routed_elsewhere_is_passed_over():
    assert free_index(set(), []) == 0
    assert free_index({0, 2}, []) == 1
    for route in ("10.89.0.0/24", "10.89.0.5", "10.128.0.0/16", "10.128.3.0/24"):
        assert free_index(set(), [route]) == 1
    assert free_index(set(), ["10.0.0.0/8", "0.0.0.0/1"]) == 0, "a wide route, as of a VPN"
    assert free_index(set(), ["10.128.0.0/12"]) == 16
    with pytest.raises(Failure, match="taken"):
        free_index(set(range(MAX_INDEX + 1)), [])


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


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "infinity"]) as started:
        yield started
        started.kill()


def identity_of(child: subprocess.Popen[bytes]) -> process.Identity:
    found = process.identify(child.pid)
    assert found is not None
    return found


def test_neither_a_zombie_nor_another_process_of_its_pid_is_alive(child):
    identity = identity_of(child)
    assert process.is_alive(identity)
    for foreign in (replace(identity, started=1), replace(identity, boot="another")):
        assert not process.is_alive(foreign)
        assert process.end([foreign], polite=False) == []
    assert child.poll() is None
    child.kill()
    wait_for(lambda: not process.is_alive(identity), "it to be a zombie")
    assert Path(f"/proc/{child.pid}").exists(), "nobody has waited for it"


@pytest.mark.parametrize(("trap", "seconds"), [("touch cleaned; exit 0", PATIENCE), ("", 0.3)])
def test_a_process_may_clean_up_and_a_deaf_one_is_killed(tmp_path, trap, seconds):
    script = f"trap '{trap}' TERM; touch ready; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path) as child:
        wait_for((tmp_path / "ready").exists, "its trap")
        process.end([identity_of(child)], seconds=seconds)
        assert child.wait(PATIENCE) == (0 if trap else -9)
    assert (tmp_path / "cleaned").exists() is bool(trap)
