"""The store of built images, buildah's in our cache, and their way into a node's containerd.

Nothing here touches the host's container storage. buildah runs in a separate mount namespace, so
that whatever it mounts is gone when it ends, however it ends. The layers lie
unpacked in the very form that containerd's overlayfs snapshotter keeps them in. So each becomes a
snapshot by hard links (files of a lower layer are never written to), and only manifest and config
are imported: seconds instead of minutes for gigabytes of torch. On another filesystem the files are
copied.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster import Failure, host
from devcluster.cachedir import Log, cache_root, locked
from devcluster.oci import ociarchive


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: the digest of its tar archive, and the directory that holds its files."""

    diff_id: str
    directory: Path


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image in the store: its manifest and config, byte for byte, and its layers."""

    manifest: str
    config: str
    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        """Return the manifest's digest, which names exactly this image."""
        return f"sha256:{hashlib.sha256(self.manifest.encode()).hexdigest()}"

    @property
    def is_whole(self) -> bool:
        """Tell whether every layer is still there."""
        return all(layer.directory.is_dir() for layer in self.layers)

    def to_json(self) -> str:
        """Return the image as JSON; `from_json` reads it back."""
        layers = [[layer.diff_id, str(layer.directory)] for layer in self.layers]
        return json.dumps({"manifest": self.manifest, "config": self.config, "layers": layers})

    @classmethod
    def from_json(cls, text: str) -> BuiltImage:
        """Read what `to_json` wrote."""
        read = json.loads(text)
        layers = tuple(Layer(diff_id, Path(directory)) for diff_id, directory in read["layers"])
        return cls(read["manifest"], read["config"], layers)


class Store:
    """The buildah store in our cache."""

    def __init__(self) -> None:
        self.home = cache_root() / "images"
        self.lock = self.home / "store.lock"
        self._root = self.home / "store"

    def buildah(
        self, arguments: Sequence[str], what: str, each_line: Callable[[str], None] | None = None
    ) -> str:
        """Run buildah and return its standard output; ``each_line`` sees lines as they come."""
        with tempfile.TemporaryDirectory(prefix="ddpjob-buildah-") as run:
            command = ["unshare", "--mount", "--propagation", "private", "buildah"]
            command += ["--root", str(self._root), "--runroot", run, "--storage-driver", "overlay"]
            command += arguments
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if each_line else subprocess.PIPE,
                text=True,
            ) as running:
                if each_line is None:
                    output, errors = running.communicate()
                else:
                    errors = _follow(running, each_line)
                    output = ""
        if running.returncode != 0:
            raise Failure(f"{what} failed: {reason(errors)}")
        return output

    def clean(self) -> None:
        """Remove working containers that an interrupted build left; call with the lock held."""
        self.buildah(["rm", "--all"], "removing left-over build containers")

    def has(self, name: str) -> bool:
        """Tell whether an image of that name is in the store."""
        listed = self.buildah(["images", "--quiet", "--filter", f"reference={name}"], "buildah")
        return bool(listed.strip())

    def tags(self, repository: str) -> list[str]:
        """Return the tags of a repository that the store has."""
        wanted = ["images", "--format", "{{.Tag}}", "--filter", f"reference={repository}"]
        return self.buildah(wanted, f"listing {repository}").split()

    def read(self, name: str) -> BuiltImage:
        """Return an image of the store."""

        def inspect(field: str) -> str:
            what = ["inspect", "--type", "image", "--format", f"{{{{.{field}}}}}", name]
            return self.buildah(what, f"reading image {name}").removesuffix("\n")

        config = inspect("Config")
        directories = self._directories()
        diff_ids: list[str] = json.loads(config)["rootfs"]["diff_ids"]
        layers = tuple(Layer(diff_id, directories[diff_id]) for diff_id in diff_ids)
        return BuiltImage(inspect("Manifest"), config, layers)

    def _directories(self) -> dict[str, Path]:
        """Return the directory of each layer by the digest of its archive."""
        text = (self._root / "overlay-layers" / "layers.json").read_text()
        known: list[dict[str, Any]] = json.loads(text)
        return {
            layer["diff-digest"]: self._root / "overlay" / layer["id"] / "diff"
            for layer in known
            if "diff-digest" in layer
        }


def _follow(running: subprocess.Popen[str], each_line: Callable[[str], None]) -> str:
    """Pass on lines as they come and return the last of them."""
    last: deque[str] = deque(maxlen=30)
    assert running.stdout is not None
    for line in running.stdout:
        last.append(line.rstrip())
        each_line(line.rstrip())
    running.wait()
    return "\n".join(last)


def reason(output: str) -> str:
    """Return what a log says of the failure: the program's own words and the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "cause:" in line]
    return " | ".join(dict.fromkeys([*telling[:3], *lines[-1:]])) or "no output"


def step_shower(log: Log) -> Callable[[str], None]:
    """Return a follower of `buildah build` that shows its steps and nothing else."""

    def show(line: str) -> None:
        if "] STEP " in line:
            words = [word for word in line.split() if not word.startswith("--mount=")]
            short = " ".join(words)
            log(short if len(short) <= 110 else f"{short[:107]}...")

    return show


@dataclass(frozen=True, slots=True)
class Containerd:
    """One node's containerd, in the namespace that the kubelet uses."""

    socket: Path

    def ctr(self, *words: str | Path, timeout: float = 600) -> str:
        """Run ctr against it."""
        argv = ["ctr", "-a", self.socket, "-n", "k8s.io", *words]
        return host.run(argv, f"containerd at {self.socket}", timeout=timeout)

    def image_digest(self, name: str) -> str | None:
        """Return the digest of the image that has that name."""
        for line in self.ctr("images", "ls", f"name=={name}").splitlines()[1:]:
            fields = line.split()
            if fields[:1] == [name]:
                return fields[2]
        return None

    def snapshots(self) -> set[str]:
        """Return the keys of all snapshots."""
        lines = self.ctr("snapshots", "ls").splitlines()[1:]
        return {line.split()[0] for line in lines if line.strip()}


def load_image(node: Containerd, name: str, image: BuiltImage, log: Log) -> None:
    """Give a node the image under that name, unless it is there."""
    with locked(node.socket.with_suffix(".load.lock"), log):
        if node.image_digest(name) == image.digest:
            return
        present = node.snapshots()
        chain = ""
        for layer in image.layers:
            parent, chain = chain, chain_id(chain, layer.diff_id)
            if chain not in present:
                _make_snapshot(node, layer, parent, chain, present)
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            manifest, config = image.manifest.encode(), image.config.encode()
            # The layers are there already.
            archive.write(ociarchive.archive(name, manifest, config))
            archive.flush()
            node.ctr("images", "import", archive.name)


def load_archive(node: Containerd, archive: Path, log: Log) -> None:
    """Import an archive that some other tool saved (OCI or Docker format)."""
    with locked(node.socket.with_suffix(".load.lock"), log):
        node.ctr("images", "import", archive, timeout=1800)


def chain_id(parent: str, diff_id: str) -> str:
    """Return the key that containerd gives the snapshot of a layer above ``parent``."""
    if not parent:
        return diff_id
    return f"sha256:{hashlib.sha256(f'{parent} {diff_id}'.encode()).hexdigest()}"


def _make_snapshot(
    node: Containerd, layer: Layer, parent: str, chain: str, present: set[str]
) -> None:
    key = f"ddpjob-load-{chain[-16:]}"
    if key in present:  # an interrupted load left it half filled
        node.ctr("snapshots", "rm", key)
    node.ctr("snapshots", "prepare", key, *([parent] if parent else []))
    target = upper_directory(node.ctr("snapshots", "mounts", "/", key))
    same_disk = layer.directory.stat().st_dev == target.stat().st_dev
    how = ["--link"] if same_disk else ["--reflink=auto"]
    host.run(
        ["cp", "--archive", *how, "--no-target-directory", layer.directory, target],
        f"filling {target}",
        timeout=1800,
    )
    node.ctr("snapshots", "commit", chain, key)


def upper_directory(mount_command: str) -> Path:
    """Return the directory to fill, from the mount command of a prepared snapshot."""
    found = re.search(r"upperdir=([^,\s]+)", mount_command)
    found = found or re.match(r"mount -t bind (\S+) ", mount_command)
    if found is None:
        raise Failure(f"containerd's overlayfs snapshotter is needed, not: {mount_command.strip()}")
    return Path(found[1])
