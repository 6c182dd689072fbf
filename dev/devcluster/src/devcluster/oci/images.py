"""The images of this checkout: built after a change of any input, and loaded into nodes.

`ddpjob/operator:0.2.0` and `ddpjob/trainer:0.2.0` come from the Dockerfile. The inputs of an image
are hashed; the same hash is not built twice, and a record in the cache keeps the result of the
build. Stages that do not change (the base, torch) are taken from buildah's layer cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from devcluster import Failure, host, venv
from devcluster.cachedir import Log, cache_root, digest, locked, timed, write_whole
from devcluster.oci import baseimage
from devcluster.oci.imagestore import (
    BuiltImage,
    Containerd,
    Store,
    load_archive,
    load_image,
    step_shower,
)

CHECKOUT = Path(__file__).resolve().parents[5]
VERSION = "0.2.0"
TARGETS = ("operator", "trainer")
_FORMAT = "1"
_NEEDED_GIBIBYTES = 8
#: Builds of each target that are kept, so that going back to another branch costs nothing.
_KEPT = 4
_COMMON = (
    "Dockerfile",
    ".dockerignore",
    *(f"dev/requirements/{one}" for one in ("install.sh", "package.sh", "uv.txt", "build.txt")),
    "contract/pyproject.toml",
    "contract/src",
)
_INPUTS = {
    "operator": ("dev/requirements/operator.txt", "operator/pyproject.toml", "operator/src"),
    "trainer": (
        "dev/requirements/torch.txt",
        "dev/requirements/trainer.txt",
        "trainer/pyproject.toml",
        "trainer/src",
        "tools/src",
        "examples",
    ),
}
#: The installer's cache, inside a build step. The directory is in every Debian.
_CACHE_IN_BUILD = "/mnt"
_CA_IN_BUILD = "/run/secrets/ca"


def reference(target: str) -> str:
    """Return the full name that manifests use for the image of a target."""
    return f"docker.io/ddpjob/{target}:{VERSION}"


def name_in_store(target: str, key: str) -> str:
    """Return the name under which the store keeps a target's image with that key."""
    return f"localhost/ddpjob/{target}:{key}"


def build(target: str, log: Log) -> BuiltImage:
    """Build the image of a target unless it is built already."""
    if target not in TARGETS:
        raise Failure(f"image {target}: must be one of {', '.join(TARGETS)}")
    host.require_root()
    store = Store()
    with locked(store.lock, log):
        while True:
            key = image_key(target)
            known = _recorded(store, target, key)
            if known is not None:
                return known
            built = _make(store, target, key, log)
            # Somebody may have saved a file meanwhile; then nobody knows what the build saw.
            if image_key(target) == key:
                write_whole(store.home / f"{target}-{key}.json", built.to_json())
                _forget_old(store, target)
                return built
            log("the sources changed meanwhile: building again")


def image_key(target: str, checkout: Path = CHECKOUT) -> str:
    """Return a hash of all that the image of a target is made of."""
    parts: list[str | bytes] = [_FORMAT, target, baseimage.name(), platform.machine()]
    for path in _files(checkout, (*_COMMON, *_INPUTS[target])):
        executable = "x" if os.access(path, os.X_OK) else "-"
        parts += [str(path.relative_to(checkout)), executable, path.read_bytes()]
    return digest(*parts)


def load_into(socket_paths: Sequence[Path], image: str, log: Log) -> None:
    """Give an image to the containerd of each node; quick where it is there already.

    ``image`` is one of ours (``ddpjob/trainer:0.2.0``; built first when it is not up to date) or
    the path of an archive that `docker save`, `podman save` or `buildah push oci-archive:` wrote.
    """
    if Path(image).is_file():
        for path in socket_paths:
            with timed(f"importing {image}", log):
                load_archive(Containerd(path), Path(image), log)
        return
    target = _target_of(image)
    built = build(target, log)
    for path in socket_paths:
        load_image(Containerd(path), reference(target), built, log)
    log(f"image {reference(target)} is in {len(socket_paths)} node(s)")


def export(target: str, archive: Path, log: Log) -> str:
    """Write the image of a target as an OCI archive; return its digest there.

    It is another than in the store, whose layers are not compressed.
    """
    build(target, log)
    store = Store()
    with locked(store.lock, log), timed(f"writing {archive.name}", log):
        name = name_in_store(target, image_key(target))
        there = f"oci-archive:{archive}:{reference(target)}"
        store.buildah(["push", "--quiet", name, there], f"writing {archive}")
    with tarfile.open(archive) as opened:
        index = opened.extractfile("index.json")
        assert index is not None
        return str(json.load(index)["manifests"][0]["digest"])


def configure(subparsers: Any) -> None:
    """Add the command `image` to a command line; `command` carries it out."""
    parser = subparsers.add_parser("image", help="build this checkout's images")
    verbs = parser.add_subparsers(dest="image_command", required=True, metavar="COMMAND")
    builder = verbs.add_parser("build", help="build what changed")
    builder.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)"
    )


def command(arguments: argparse.Namespace, log: Log) -> None:
    """Carry out `image build`; print name and digest of each image."""
    for target in arguments.targets or TARGETS:
        built = build(target, log)
        print(f"{reference(target)} {built.digest}")


def _target_of(image: str) -> str:
    for target in TARGETS:
        if image in (target, reference(target), reference(target).removeprefix("docker.io/")):
            return target
    ours = ", ".join(reference(target).removeprefix("docker.io/") for target in TARGETS)
    raise Failure(
        f"image {image}: neither one of this checkout ({ours}) nor a file; save yours with"
        " `docker save` or `podman save` and load that file"
    )


def _files(checkout: Path, inputs: Sequence[str]) -> Iterator[Path]:
    for name in sorted(inputs):
        path = checkout / name
        if path.is_dir():
            found = (each for each in path.rglob("*") if each.is_file())
            yield from sorted(
                each
                for each in found
                if "__pycache__" not in each.parts and each.suffix not in (".pyc", ".pyo")
            )
        elif path.exists():
            yield path
        else:
            raise Failure(f"{path} is missing: images are built from a whole checkout")


def _recorded(store: Store, target: str, key: str) -> BuiltImage | None:
    """Return what an earlier build of this key gave, if the store still has it."""
    record = store.home / f"{target}-{key}.json"
    if not record.exists():
        return None
    known = BuiltImage.from_json(record.read_text())
    if not known.is_whole:
        return None
    record.touch()  # the least recently used are forgotten first
    return known


def _forget_old(store: Store, target: str) -> None:
    """Remove all but the newest builds of a target, with the layers that only they use."""
    records = sorted(store.home.glob(f"{target}-*.json"), key=lambda each: each.stat().st_mtime)
    for record in records[:-_KEPT]:
        record.unlink()
    kept = {record.stem.removeprefix(f"{target}-") for record in records[-_KEPT:]}
    for tag in store.tags(f"localhost/ddpjob/{target}"):
        if tag not in kept:
            name = name_in_store(target, tag)
            store.buildah(["rmi", name], f"removing the old image {name}")


def _make(store: Store, target: str, key: str, log: Log) -> BuiltImage:
    """Build an image, its base too if need be; call with the store's lock held."""
    host.ensure_packages(baseimage.HOST_PACKAGES, log)
    host.require_space(store.home, _NEEDED_GIBIBYTES, "building images", "DDPJOB_CACHE")
    store.clean()
    base = baseimage.ensure(store, log)
    name = name_in_store(target, key)
    with timed(f"building image {target}", log):
        _build(store, target, name, base, log)
    return store.read(name)


def _build(store: Store, target: str, name: str, base: str, log: Log) -> None:
    installer_cache = cache_root() / "uv"
    installer_cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ddpjob-secrets-") as secrets:
        command = ["build", "--layers", "--isolation", "chroot", "--network", "host"]
        command += ["--format", "oci", "--target", target, "--tag", name]
        command += ["--build-arg", f"BASE_IMAGE={base}"]
        command += ["--pull-never"] if base.startswith("localhost/") else []
        command += ["--volume", f"{installer_cache}:{_CACHE_IN_BUILD}"]
        command += _index_secrets(Path(secrets))
        store.buildah([*command, str(CHECKOUT)], f"building image {target}", step_shower(log))


def _index_secrets(directory: Path) -> list[str]:
    """Write what a build step needs to reach the package index as this host does."""
    settings = venv.reachable_from_elsewhere(venv.pip_settings())
    ca = settings.pop("cert", None) or os.environ.get("SSL_CERT_FILE")
    variables = {"UV_CACHE_DIR": _CACHE_IN_BUILD, "UV_NO_CACHE": "0"}
    variables |= venv.uv_environment(settings) | venv.pip_environment(settings)
    variables |= {name: os.environ[name] for name in venv.UV_INDEX_VARIABLES & os.environ.keys()}
    words: list[str] = []
    if ca and Path(ca).is_file():
        variables |= {"SSL_CERT_FILE": _CA_IN_BUILD, "PIP_CERT": _CA_IN_BUILD}
        words += ["--secret", f"id=ca,src={ca}"]
    index = directory / "index"
    index.write_text("".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items()))
    return [*words, "--secret", f"id=index,src={index}"]
