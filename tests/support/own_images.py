"""Images as users make them: the Dockerfiles of docs/start/your-script.md, built as they are.

They are built by buildah in devcluster's own store, from what that holds, and their layers go to
the nodes of a cluster; a registry is in none of it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from devcluster import baseimage, host, images, pypi, venv
from devcluster import cluster as devclusters
from devcluster.cachedir import cache_root, digest, ensure_dir, locked, timed
from devcluster.imageload import Containerd, load_image
from devcluster.imagestore import BuiltImage, Store
from support.cluster import CHECKOUT, ROOT
from support.patience import WITHIN
from support.site import Site

PAGE = ROOT / "docs" / "start" / "your-script.md"
#: One of the places where any pip looks for its settings; a build step sees there what we give it.
_SETTINGS = "/etc/xdg/pip"


def blocks(heading: str, page: Path = PAGE) -> list[str]:
    """What stands in the fences of a section, in their order."""
    text = page.read_text()
    assert f"\n## {heading}\n" in text, heading
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


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


def debian(suite: str, *packages: str) -> str:
    """An image of a release of Debian with these packages: its name in the store, where it stays.

    Not by debootstrap, which knows of no alternatives and no virtual packages.
    """
    store, name = Store(), f"localhost/ddpjob/debian:{suite}-{digest('1', *packages)}"
    with locked(store.lock, print):
        if store.has(name):
            return name
    host.ensure_packages({"mmdebstrap": "mmdebstrap", **baseimage.HOST_PACKAGES}, print)
    # Minutes without the lock, which whoever builds an image wants.
    with tempfile.TemporaryDirectory() as aside, timed(f"making {name}", print):
        tree = f"{aside}/tree.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase"]
        command += [f"--aptopt={line}" for line in _apt_settings()]
        command += [f"--include={','.join(packages)}", suite, tree, *baseimage._mirror()]
        subprocess.run(command, env=baseimage._environment(), check=True)
        with locked(store.lock, print):
            store.clean()
            working = store.buildah(["from", "scratch"], name).strip()
            store.buildah(["add", "--quiet", working, tree, "/"], name)
            store.buildah(["config", "--env", "LANG=C.UTF-8", working], name)
            store.buildah(["commit", "--quiet", "--rm", working, name], name)
    return name


def _apt_settings() -> list[str]:
    """How this host's apt looks at its mirror: what mmdebstrap's own apt does not read."""
    shown = host.run(["apt-config", "dump"])
    return [line for line in shown.splitlines() if line.startswith("Acquire::Check-Valid-Until ")]


def into_nodes(cluster: str, reference: str, name: str) -> None:
    """Give an image of the store to all nodes of a cluster, under a reference with its registry."""
    image = _read(name)
    for node in devclusters.require(cluster).members:
        load_image(Containerd(node.containerd_socket), reference, image, print)


def from_cache(directory: Path, *packages: str) -> Path:
    """Settings of a pip that finds these in a folder, filled from the index once per machine."""
    kept = cache_root() / f"wheels-{digest('1', *packages)}"

    def download(aside: Path) -> None:
        uv = venv.ensure_uv(ROOT / "requirements", print)  # its environment has a pip
        command = [str(uv / "bin/python"), "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "--dest", aside, *packages], check=True)

    ensure_dir(kept, download, print)
    shutil.copytree(kept, directory)
    _configure(directory, {"no-index": "true", "find-links": _SETTINGS})
    return directory


def from_index(directory: Path) -> Path:
    """Settings of a pip that reaches the index as this host's does."""
    uv = venv.ensure_uv(ROOT / "requirements", print)
    found = pypi.pip_settings(str(uv / "bin/python"))
    settings = pypi.reachable_from_elsewhere(found)
    directory.mkdir()
    if "cert" in settings:
        shutil.copyfile(settings["cert"], directory / "ca.pem")
        settings["cert"] = f"{_SETTINGS}/ca.pem"
    _configure(directory, settings)
    return directory


def _configure(directory: Path, settings: dict[str, str]) -> None:
    lines = [f"{key} = {value}" for key, value in settings.items()]
    (directory / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))


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


def _read(name: str) -> BuiltImage:
    store = Store()
    with locked(store.lock, print):
        return store.read(name)


def _remove(store: Store, name: str) -> None:
    if store.has(name):
        store.buildah(["rmi", name], f"removing {name}")
