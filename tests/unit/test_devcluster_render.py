"""The devcluster's configuration files, cgroup hierarchies, images, volumes, and versions."""

from __future__ import annotations

import io
import json
import tarfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from devcluster import binaries, busybox, cgroups, host, kwok, lifecycle, network, render, volumes
from devcluster.failure import Failure
from devcluster.layout import Layout

LAYOUT = Layout("dev", 3, Path("/var/lib/devcluster/dev"))
NODE = LAYOUT.node(2)


def test_containerd_gets_the_nodes_own_paths_and_our_pause_image() -> None:
    config = tomllib.loads(render.containerd(NODE))
    assert config["root"] == "/var/lib/devcluster/dev/node2/containerd"
    assert config["grpc"]["address"] == str(NODE.containerd_socket)
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["sandbox_image"] == render.PAUSE_IMAGE
    assert cri["cni"]["conf_dir"] == f"{NODE.home}/cni"


def test_pods_get_addresses_of_their_node() -> None:
    plugin = json.loads(render.cni(NODE))["plugins"][0]
    assert plugin["ipam"]["ranges"] == [[{"subnet": "10.131.2.0/24"}]]


def test_the_kubelet_asks_the_clusters_dns_and_its_own_containerd() -> None:
    config = json.loads(render.kubelet(LAYOUT, NODE))
    assert config["clusterDNS"] == ["10.89.3.1"]
    assert config["containerRuntimeEndpoint"] == f"unix://{NODE.containerd_socket}"
    assert config["address"] == "10.89.3.12"


def test_nothing_without_tls_listens_where_pods_reach_it() -> None:
    assert all("10.89." not in argument for argument in render.etcd(LAYOUT))
    assert f"--bind-address={LAYOUT.loopback}" in render.controller_manager(LAYOUT, 2)
    assert f"--bind-address={LAYOUT.loopback}" in render.scheduler(LAYOUT)
    assert f"--server-address={LAYOUT.loopback}:10247" in kwok.arguments(LAYOUT)


def test_who_writes_nodes_by_hand_need_not_be_quick() -> None:
    for nodes, seconds in ((0, 900), (1, 20), (2, 20)):
        arguments = render.controller_manager(LAYOUT, nodes)
        assert f"--node-monitor-grace-period={seconds}s" in arguments


def test_cgroup_hierarchies_are_found_with_what_mounts_them_again() -> None:
    mounts = """proc /proc proc rw 0 0
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,release_agent=/lib/x,name=systemd 0 0
"""
    found = cgroups.parse(mounts, {"cpu", "cpuacct", "memory"})
    assert [(str(one.where), one.kind, one.options) for one in found] == [
        ("/sys/fs/cgroup/unified", "cgroup2", ""),
        ("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct"),
        ("/sys/fs/cgroup/systemd", "cgroup", "none,name=systemd"),
    ]


def test_the_pause_image_is_whole_and_always_the_same() -> None:
    packed = busybox.image(b"program", ["vi", "sh", "cat", "busybox", "sleep"])
    assert packed == busybox.image(b"program", ["sleep", "sh", "vi", "cat"])
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == render.PAUSE_IMAGE
    manifest = json.loads(files[f"blobs/{entry['digest'].replace(':', '/')}"])
    for blob in (manifest["config"], *manifest["layers"]):
        data = files[f"blobs/{blob['digest'].replace(':', '/')}"]
        assert len(data) == blob["size"]
        assert busybox._digest(data) == blob["digest"]
    with tarfile.open(fileobj=io.BytesIO(data)) as layer:
        assert layer.getmember("bin/sh").linkname == "busybox"
        links = [member.name for member in layer if member.issym()]
        assert links == ["bin/cat", "bin/sh", "bin/sleep", "bin/vi"]
        assert layer.extractfile("bin/busybox").read() == b"program"  # type: ignore[union-attr]


def claim(**spec: Any) -> dict[str, Any]:
    meta = {"name": "data", "namespace": "default", "uid": "u1"}
    request = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteMany"]}
    return {"metadata": meta, "spec": {"storageClassName": "shared", **request, **spec}}


def test_only_an_unbound_claim_of_the_class_wants_a_volume() -> None:
    assert volumes.is_wanting(claim())
    assert not volumes.is_wanting(claim(volumeName="pv"))
    assert not volumes.is_wanting(claim(storageClassName="other"))
    going = claim()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not volumes.is_wanting(going)


def test_a_volume_is_bound_to_its_claim_alone() -> None:
    volume = volumes.volume_for(claim(), Path("/v/shared-u1"))
    assert volume["metadata"]["name"] == "shared-u1"
    assert volume["spec"]["claimRef"]["uid"] == "u1"
    assert volume["spec"]["hostPath"]["path"] == "/v/shared-u1"


@pytest.mark.parametrize(
    ("phase", "by", "released"),
    [
        ("Released", volumes.PROVISIONER, True),
        ("Bound", volumes.PROVISIONER, False),
        ("Released", "another", False),
    ],
)
def test_only_our_released_volumes_are_removed(phase: str, by: str, released: bool) -> None:
    annotations = {"pv.kubernetes.io/provisioned-by": by}
    volume = {"metadata": {"annotations": annotations}, "status": {"phase": phase}}
    assert volumes.is_released(volume) is released


@pytest.mark.parametrize(
    ("name", "says", "suitable"),
    [
        ("kubelet", "Kubernetes v1.36.3", True),
        ("kubelet", "Kubernetes v1.36.30", False),
        ("kubelet", "Kubernetes v1.36.3-beta.1", False),
        ("kubelet", "Kubernetes v1.35.3", False),
        ("kubectl", "Client Version: v1.36.3\nKustomize Version: v5.8.1", True),
        ("kubectl", "Client Version: v1.32.4-dispatcher", False),
        ("etcd", "etcd Version: 3.6.8\nGit SHA: x", True),
        ("etcd", "etcd Version: 3.4.23", False),
        ("etcd", "", False),
        ("coredns", "CoreDNS-1.14.1\nlinux/amd64", True),
        ("coredns", "CoreDNS-1.11.1", False),
        ("kwok", "kwok version v0.8.0 go1.26", True),
    ],
)
def test_a_program_is_used_only_in_the_right_version(name: str, says: str, suitable: bool) -> None:
    assert binaries.is_suitable(name, says) is suitable


def test_another_api_server_takes_the_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {name: Path("/bin/true") for name in ("kube-apiserver", "kubectl")}
    monkeypatch.setattr(binaries, "_installed", lambda names: {name: ours[name] for name in names})
    other = tmp_path / "older"
    monkeypatch.setenv(binaries.OTHER_API_SERVER, str(other))
    with pytest.raises(Failure, match="name a kube-apiserver"):
        binaries.ensure(ours, print)
    other.write_text("")
    other.chmod(0o755)
    assert binaries.ensure(ours, print) == {**ours, "kube-apiserver": other}
    assert binaries.ensure(["kubectl"], print) == {"kubectl": ours["kubectl"]}


def node_object(ready: str, *taints: str) -> dict[str, Any]:
    seen = "2026-01-02T03:04:05Z"
    conditions = [{"type": "Ready", "status": ready, "lastHeartbeatTime": seen}]
    return {"status": {"conditions": conditions}, "spec": {"taints": [{"key": t} for t in taints]}}


def test_a_node_is_ready_once_pods_may_land_there() -> None:
    assert lifecycle.is_ready(node_object("True"))
    assert lifecycle.is_ready(node_object("True", "example.com/mine"))
    assert not lifecycle.is_ready(node_object("Unknown"))
    assert not lifecycle.is_ready(node_object("True", "node.kubernetes.io/not-ready"))


def test_a_node_that_was_ready_before_its_kubelet_started_is_not_yet() -> None:
    reported = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    assert lifecycle.is_ready(node_object("True"), reported)
    assert not lifecycle.is_ready(node_object("True"), reported + 1)


@pytest.mark.parametrize(
    ("rules", "dropped"),
    [
        ("-P INPUT DROP\n-P FORWARD ACCEPT\n", False),
        ("-P FORWARD DROP\n-A FORWARD -i docker0 -o eth0 -j ACCEPT\n", True),
        ("-P FORWARD DROP\n-A FORWARD -i dc+ -o dc+ -j ACCEPT\n", False),
        ("-P FORWARD DROP\n-N DOCKER-USER\n-A DOCKER-USER -i dc+ -o dc+ -j ACCEPT\n", False),
        ("-P FORWARD DROP\n-A FORWARD -i dc+ -o dc+ -j DROP\n", True),
    ],
)
def test_a_firewall_drops_unless_a_rule_lets_nodes_talk(rules: str, dropped: bool) -> None:
    assert network.drops(rules) is dropped


@pytest.mark.parametrize(
    ("link", "bridge_is_ours", "own"),
    [
        ({"ifalias": "devcluster /s/one"}, False, True),
        ({"ifalias": "devcluster /t/one", "master": "dc3"}, True, False),
        ({"ifalias": "devcluster /t/one"}, True, False),
        ({"master": "dc3"}, True, True),
        ({"master": "dc3"}, False, False),
        ({"master": "br0"}, True, False),
        ({}, False, True),
    ],
)
def test_a_link_is_told_from_another_clusters(
    link: dict[str, Any], bridge_is_ours: bool, own: bool
) -> None:
    layout = Layout("one", 3, Path("/s/one"))
    assert network.is_own(layout, link, bridge_is_ours) is own


def test_a_full_disk_is_told_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"needs 99999999 GiB .* set X to a directory"):
        host.require_space(tmp_path / "not" / "there", 99_999_999, "a cluster", "X")


def test_missing_programs_name_their_packages() -> None:
    wanted = {"sh": "dash", "no-such-program": "b", "/no/such/file": "a", "/proc": "c"}
    assert host.missing_packages(wanted) == ["a", "b"]


def test_a_failed_command_is_told_on_one_line() -> None:
    with pytest.raises(Failure, match=r"^why: second$"):
        host.run(["sh", "-c", "echo first >&2; echo second >&2; exit 1"], why="why")
