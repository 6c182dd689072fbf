"""The shared volume: directories of the host behind ReadWriteMany claims of class `shared`.

Run as a process of the cluster (`python3 -m devcluster.node.volumes STATE INDEX`). A claim gets a
directory that anyone may write, as trainers do not run as root; when the claim is deleted the
volume and the directory go too. All state is in the API, so it may be restarted at any moment.
"""

from __future__ import annotations

import http.client
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from devcluster.api import Api, ApiError, connect
from devcluster.layout import Layout

CLASS = "shared"
PROVISIONER = "devcluster/shared"
_CLAIMS = "/api/v1/persistentvolumeclaims"
_VOLUMES = "/api/v1/persistentvolumes"
_WATCH_SECONDS = 30

STORAGE_CLASS: dict[str, Any] = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": CLASS,
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": PROVISIONER,
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "Immediate",
}


def volume_for(claim: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the PersistentVolume for a claim."""
    meta, spec = claim["metadata"], claim["spec"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": f"{CLASS}-{meta['uid']}",
            "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
        },
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
            "hostPath": {"path": str(directory), "type": "Directory"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
        },
    }


def is_wanting(claim: dict[str, Any]) -> bool:
    """Tell whether a claim waits for a volume of ours."""
    spec, meta = claim["spec"], claim["metadata"]
    ours = spec.get("storageClassName") == CLASS and not spec.get("volumeName")
    return ours and "deletionTimestamp" not in meta


def is_released(volume: dict[str, Any]) -> bool:
    """Tell whether a volume is ours and its claim has been deleted."""
    by = volume["metadata"].get("annotations", {}).get("pv.kubernetes.io/provisioned-by")
    return by == PROVISIONER and volume.get("status", {}).get("phase") in ("Released", "Failed")


def provision(api: Api, layout: Layout) -> str:
    """Make and remove volumes once; return the version of the list of claims that was seen."""
    claims = api.get(_CLAIMS)
    volumes = api.get(_VOLUMES)["items"]
    known = {volume["metadata"]["name"] for volume in volumes}
    for claim in claims["items"]:
        name = f"{CLASS}-{claim['metadata']['uid']}"
        if is_wanting(claim) and name not in known:
            directory = layout.volumes / name
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o777)
            api.ensure(_VOLUMES, volume_for(claim, directory))
            print(f"made {name} for {claim['metadata']['namespace']}/{claim['metadata']['name']}")
    for volume in volumes:
        if is_released(volume):
            name = volume["metadata"]["name"]
            api.delete(f"{_VOLUMES}/{name}")
            shutil.rmtree(layout.volumes / name, ignore_errors=True)
            print(f"removed {name}")
    return str(claims["metadata"]["resourceVersion"])


def serve(layout: Layout) -> None:
    """Provision for ever, after each change of a claim and after pauses."""
    api = connect(layout)
    while True:
        try:
            version = provision(api, layout)
            for event in api.watch(_CLAIMS, version, _WATCH_SECONDS):
                if event["type"] == "DELETED":
                    time.sleep(0.2)  # its volume becomes Released a moment later
                break
        except (OSError, ValueError, ApiError, http.client.HTTPException) as error:
            print(f"waiting for the API server: {error}")
            time.sleep(1)


if __name__ == "__main__":
    state = Path(sys.argv[1])
    serve(Layout(state.name, int(sys.argv[2]), state))
