"""Images into a real containerd: what hard-linked layers look like from inside a container."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import host
from devcluster.imageload import Containerd, chain_id, load_image
from devcluster.imagestore import BuiltImage, Layer
from support.patience import PATIENCE

pytestmark = pytest.mark.root

NAME = "docker.io/ddpjob/little:1"
CONFIG = """version = 2
root = "{home}/root"
state = "{home}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{home}/containerd.sock"
"""


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture
def node() -> Iterator[Containerd]:
    """A containerd of our own, without kubelet."""
    host.require_root()
    host.ensure_packages(host.PACKAGES, quiet)
    home = Path(tempfile.mkdtemp())  # not tmp_path: a socket's path has 104 characters at most
    (home / "config.toml").write_text(CONFIG.format(home=home))
    log = (home / "log").open("wb")
    running = subprocess.Popen(
        ["containerd", "-c", str(home / "config.toml")], stdout=log, stderr=log
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(home / "containerd.sock"):
            assert running.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, "containerd does not answer"
            time.sleep(0.05)
        yield Containerd(home / "containerd.sock")
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(PATIENCE)
        shutil.rmtree(home)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@pytest.fixture
def image(tmp_path: Path) -> BuiltImage:
    """Two layers: busybox and two files; then one file replaced and the other removed."""
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    (lower / "bin").mkdir(parents=True)
    shutil.copy("/bin/busybox", lower / "bin/busybox")
    (lower / "kept").write_text("from the lower layer")
    (lower / "replaced").write_text("from the lower layer")
    (lower / "removed").write_text("from the lower layer")
    upper.mkdir()
    (upper / "replaced").write_text("from the upper layer")
    os.mknod(upper / "removed", 0o20000, os.makedev(0, 0))  # overlayfs' own sign of absence
    return make_image([lower, upper])


def make_image(directories: list[Path], comment: str = "") -> BuiltImage:
    layers = tuple(Layer(digest_of(path.name), path) for path in directories)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "author": comment,
            "config": {"Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
    )
    blob = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{blob}.manifest.v1+json",
        "config": {
            "mediaType": f"{blob}.config.v1+json",
            "digest": digest_of(config),
            "size": len(config),
        },
        "layers": [
            {"mediaType": f"{blob}.layer.v1.tar", "digest": layer.diff_id, "size": 10240}
            for layer in layers
        ],
    }
    return BuiltImage(json.dumps(manifest), config, layers)


def digest_of(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def inside(node: Containerd, script: str) -> str:
    """What a shell script prints in a container of the image.

    Into a file: ctr itself drops what it has not begun to read when the container ends.
    """
    name = f"c{time.monotonic_ns()}"
    told = node.socket.parent / name
    to_file = ("--log-uri", f"file://{told}")
    node.ctr("run", "--rm", *to_file, NAME, name, "busybox", "sh", "-c", script)
    return told.read_text()


def test_layers_lie_above_one_another(node: Containerd, image: BuiltImage) -> None:
    assert load_image(node, NAME, image, quiet)
    seen = inside(node, "busybox cat /kept; echo; busybox cat /replaced; echo; busybox ls /")
    lines = seen.splitlines()
    assert lines[:2] == ["from the lower layer", "from the upper layer"]
    assert "kept" in lines
    assert "removed" not in lines
    assert node.image_digest(NAME) == image.digest


def test_files_are_shared_and_a_container_cannot_change_them(
    node: Containerd, image: BuiltImage
) -> None:
    load_image(node, NAME, image, quiet)
    kept = image.layers[0].directory / "kept"
    assert kept.stat().st_nlink == 2, "a load must not copy"
    script = "echo mine > /kept; busybox chmod 600 /kept; busybox rm /replaced; busybox cat /kept"
    assert inside(node, script).strip() == "mine"
    assert kept.read_text() == "from the lower layer"
    assert kept.stat().st_mode & 0o777 == 0o644
    assert inside(node, "busybox cat /kept /replaced") == (
        "from the lower layerfrom the upper layer"
    )


def test_the_second_load_does_nothing(node: Containerd, image: BuiltImage) -> None:
    assert load_image(node, NAME, image, quiet)
    before = node.snapshots()
    assert not load_image(node, NAME, image, quiet)
    assert node.snapshots() == before


def test_a_newer_image_takes_the_name_and_shares_layers(
    node: Containerd, image: BuiltImage, tmp_path: Path
) -> None:
    load_image(node, NAME, image, quiet)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "replaced").write_text("from the newer layer")
    lower = image.layers[0].directory
    assert load_image(node, NAME, make_image([lower, newer]), quiet)
    assert inside(node, "busybox cat /replaced") == "from the newer layer"
    assert len(node.snapshots()) == 3


def test_an_interrupted_load_is_made_good(node: Containerd, image: BuiltImage) -> None:
    chain = chain_id("", image.layers[0].diff_id)
    node.ctr("snapshots", "prepare", f"ddpjob-load-{chain[-16:]}")
    assert load_image(node, NAME, image, quiet)
    assert inside(node, "busybox cat /kept") == "from the lower layer"
