"""Images as users make them: the Dockerfiles of docs/start/your-script.md, built as they are.

They are built by buildah in devcluster's own store, from what that holds, and their layers go to
the nodes of a cluster; a registry is in none of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from devcluster import cluster as devclusters
from devcluster import images, pypi, venv
from devcluster.cachedir import locked
from devcluster.imageload import Containerd, load_image
from devcluster.imagestore import Store
from support.cluster import CHECKOUT, ROOT
from support.manifest import blocks
from support.patience import WITHIN
from support.site import Site

#: One of the places where any pip looks for its settings; a build step sees there what we give it.
_SETTINGS = "/etc/xdg/pip"


def trainer() -> str:
    """This checkout's trainer image, built if need be: its name in the store."""
    images.build("trainer", print)
    return images.name_in_store("trainer", images.image_key("trainer"))


@contextmanager
def built(name: str, dockerfile: str, context: Path, pip: Path) -> Iterator[str]:
    """Build it and yield its name in the store, from which it goes at the end.

    ``pip``: a folder with pip.conf, and what that names as being in /etc/xdg/pip.
    """
    store, there = Store(), f"localhost/ddpjob/own:{CHECKOUT}-{name}"
    file = pip / f"Dockerfile.{name}"
    file.write_text(dockerfile)
    command = ["build", "--isolation", "chroot", "--network", "host", "--format", "oci"]
    command += ["--pull-never", "--volume", f"{pip}:{_SETTINGS}", "--file", str(file)]
    with locked(store.lock, print):
        _remove(store, there)  # an interrupted run may have left one
        store.buildah([*command, "--tag", there, str(context)], f"building {there}", print)
    try:
        yield there
    finally:
        with locked(store.lock, print):
            _remove(store, there)


def into_nodes(cluster: str, reference: str, name: str) -> None:
    """Give an image of the store to all nodes of a cluster, under a reference with its registry."""
    store = Store()
    with locked(store.lock, print):
        image = store.read(name)
    for node in devclusters.require(cluster).members:
        load_image(Containerd(node.containerd_socket), reference, image, print)


def from_index(directory: Path) -> Path:
    """Settings of a pip that reaches the index as this host's does."""
    uv = venv.ensure_uv(ROOT / "requirements", print)
    found = pypi.pip_settings(str(uv / "bin/python"))
    settings = pypi.reachable_from_elsewhere(found)
    directory.mkdir()
    if "cert" in settings:
        shutil.copyfile(settings["cert"], directory / "ca.pem")
        settings["cert"] = f"{_SETTINGS}/ca.pem"
    lines = [f"{key} = {value}" for key, value in settings.items()]
    (directory / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return directory


def serving(site: Site, name: str, image: str, command: list[str], port: int) -> str:
    """Start a pod that serves: its address, once it is ready. The page's pod of a minute."""
    pod = yaml.safe_load(blocks("The weights")[0])
    pod["metadata"]["name"] = name
    del pod["spec"]["volumes"]
    (container,) = pod["spec"]["containers"]
    del container["volumeMounts"]
    container |= {"image": image, "command": command}
    container["readinessProbe"] = {"tcpSocket": {"port": port}, "periodSeconds": 1}
    site.apply(pod)
    site.kubectl("wait", "--for=condition=Ready", f"pod/{name}", WITHIN, check=True)
    address: str = site.get("pod", name)["status"]["podIP"]
    return address


def _remove(store: Store, name: str) -> None:
    if store.has(name):
        store.buildah(["rmi", name], f"removing {name}")
