"""A small image from Debian's static busybox: every pod's pause image, and a test shell."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

from devcluster.cachedir import Log, cache_root, digest, ensure_dir
from devcluster.failure import Failure
from devcluster.render import PAUSE_IMAGE

_FORMAT = "1"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(log: Log) -> Path:
    """Return the image as an OCI archive, made once per version of busybox."""
    program = Path(shutil.which("busybox") or "/bin/busybox")
    content = program.read_bytes()
    home = cache_root() / f"busybox-{digest(_FORMAT, content)}"

    def make(aside: Path) -> None:
        listed = subprocess.run(
            [str(program), "--list"], capture_output=True, text=True, check=True
        )
        (aside / "image.tar").write_bytes(image(content, listed.stdout.split()))

    ensure_dir(home, make, log)
    return home / "image.tar"


def image(program: bytes, applets: list[str]) -> bytes:
    """Return the OCI archive; the same bytes for the same input."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise Failure(f"machine {machine}: devcluster runs on {' and '.join(_MACHINES)}")
    layer = _layer(program, applets)
    config = _json(
        {
            "architecture": _MACHINES[machine],
            "os": "linux",
            "config": {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    oci = "application/vnd.oci.image"
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": _descriptor(f"{oci}.config.v1+json", config),
            "layers": [_descriptor(f"{oci}.layer.v1.tar", layer)],
        }
    )
    entry = _descriptor(f"{oci}.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": PAUSE_IMAGE}
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
    }
    for blob in (layer, config, manifest):
        files[f"blobs/{_digest(blob).replace(':', '/')}"] = blob
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            _add(tar, name, data, 0o644)
    return packed.getvalue()


def _layer(program: bytes, applets: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, mode
            tar.addfile(directory)
        _add(tar, "bin/busybox", program, 0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)
        for applet in sorted(set(applets) - {"busybox"}):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}
