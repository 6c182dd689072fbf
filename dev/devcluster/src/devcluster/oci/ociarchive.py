"""Packs a file tree as an OCI archive of one layer, without a container tool.

kueue.py makes its image so, and the pause image and test shell are busybox: the same bytes for
the same input.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster import Failure
from devcluster.cachedir import Log, cache_root, digest, ensure_dir
from devcluster.render import PAUSE_IMAGE

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_OCI = "application/vnd.oci.image"


def pack(name: str, layer: bytes, config: Mapping[str, Any]) -> bytes:
    """Return the archive of an image: its layer is a tar, its config what a container starts."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise Failure(f"machine {machine}: devcluster runs on {' and '.join(_MACHINES)}")
    about = _json(
        {
            "architecture": _MACHINES[machine],
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _descriptor(f"{_OCI}.config.v1+json", about),
            "layers": [_descriptor(f"{_OCI}.layer.v1.tar", layer)],
        }
    )
    return archive(name, manifest, about, layer)


def archive(name: str, manifest: bytes, *blobs: bytes) -> bytes:
    """Return an OCI archive of a manifest and of those that it names, so far as they are given."""
    entry = _descriptor(f"{_OCI}.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name}
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
    }
    files |= {f"blobs/{_digest(blob).replace(':', '/')}": blob for blob in (manifest, *blobs)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, data in files.items():
            add(tar, path, data, 0o644)
    return packed.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    """Add a file to a tar, owned by root and without a date."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}


_BUSYBOX_FORMAT = "1"


def busybox(log: Log) -> Path:
    """Return the image as an OCI archive, made once per version of busybox."""
    program = Path(shutil.which("busybox") or "/bin/busybox")
    content = program.read_bytes()
    home = cache_root() / f"busybox-{digest(_BUSYBOX_FORMAT, content)}"

    def make(aside: Path) -> None:
        listed = subprocess.run(
            [str(program), "--list"], capture_output=True, text=True, check=True
        )
        (aside / "image.tar").write_bytes(busybox_image(content, listed.stdout.split()))

    ensure_dir(home, make, log)
    return home / "image.tar"


def busybox_image(program: bytes, applets: list[str]) -> bytes:
    """Return the OCI archive; the same bytes for the same input."""
    config = {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]}
    return pack(PAUSE_IMAGE, _busybox_layer(program, applets), config)


def _busybox_layer(program: bytes, applets: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, mode
            tar.addfile(directory)
        add(tar, "bin/busybox", program, 0o755)
        add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)
        for applet in sorted(set(applets) - {"busybox"}):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return packed.getvalue()
