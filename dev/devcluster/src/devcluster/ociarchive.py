"""Packs a file tree as an OCI archive of one layer, without a container tool.

busybox.py and kueue.py make their images so: the same bytes for the same input.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from typing import Any

from devcluster.failure import Failure

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
    entry = _descriptor(f"{_OCI}.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name}
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
    }
    for blob in (layer, about, manifest):
        files[f"blobs/{_digest(blob).replace(':', '/')}"] = blob
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
