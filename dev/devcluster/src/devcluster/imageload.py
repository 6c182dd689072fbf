"""Loads an image into a node's containerd, without copying a byte of it.

The layers lie unpacked in the build store, in the very form that containerd's overlayfs snapshotter
keeps them in. So each becomes a snapshot by hard links (files of a lower layer are never written
to), and only manifest and config are imported: seconds instead of minutes for gigabytes of torch,
no disk space, and one page cache for all nodes. On another filesystem the files are copied.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from devcluster import host
from devcluster.cachedir import Log, locked
from devcluster.failure import Failure
from devcluster.imagestore import BuiltImage, Layer

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


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


def load_image(node: Containerd, name: str, image: BuiltImage, log: Log) -> bool:
    """Give a node the image under that name; return whether it lacked it."""
    with locked(node.socket.with_suffix(".load.lock"), log):
        if node.image_digest(name) == image.digest:
            return False
        present = node.snapshots()
        chain = ""
        for layer in image.layers:
            parent, chain = chain, chain_id(chain, layer.diff_id)
            if chain not in present:
                _make_snapshot(node, layer, parent, chain, present)
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            archive.write(metadata_archive(name, image))
            archive.flush()
            node.ctr("images", "import", archive.name)
    return True


def load_archive(node: Containerd, archive: Path, log: Log) -> None:
    """Import an archive that some other tool saved (OCI or Docker format)."""
    with locked(node.socket.with_suffix(".load.lock"), log):
        node.ctr("images", "import", archive, timeout=1800)


def chain_id(parent: str, diff_id: str) -> str:
    """Return the key that containerd gives the snapshot of a layer above ``parent``."""
    if not parent:
        return diff_id
    return f"sha256:{hashlib.sha256(f'{parent} {diff_id}'.encode()).hexdigest()}"


def metadata_archive(name: str, image: BuiltImage) -> bytes:
    """Return an OCI archive of manifest and config only; the layers are there already."""
    manifest, config = image.manifest.encode(), image.config.encode()
    entry = {
        "mediaType": _MANIFEST_TYPE,
        "digest": image.digest,
        "size": len(manifest),
        "annotations": {"io.containerd.image.name": name},
    }
    files = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        f"blobs/sha256/{hashlib.sha256(manifest).hexdigest()}": manifest,
        f"blobs/sha256/{hashlib.sha256(config).hexdigest()}": config,
    }
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for path, content in files.items():
            about = tarfile.TarInfo(path)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return whole.getvalue()


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
    upper = re.search(r"upperdir=([^,\s]+)", mount_command)
    bound = re.match(r"mount -t bind (\S+) ", mount_command)
    found = upper or bound
    if found is None:
        raise Failure(f"containerd's overlayfs snapshotter is needed, not: {mount_command.strip()}")
    return Path(found[1])
