"""The base image without a registry: a small Debian with Python, by debootstrap.

It replaces `python:3.11-slim`. With DDPJOB_BASE_IMAGE set to an image of a registry that can be
reached, that one is used instead.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from devcluster import Failure, host
from devcluster.cachedir import Log, digest, timed
from devcluster.oci.imagestore import Store, reason

_FORMAT = "1"
_SUITE = "bookworm"
_PACKAGES = ("python3", "python3-venv", "ca-certificates", "netbase", "tzdata")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
#: Installed by debootstrap and of no use in a container.
_USELESS = (
    "var/cache/apt/archives",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/log",
)
HOST_PACKAGES = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "unshare": "util-linux",
    "/etc/containers/policy.json": "golang-github-containers-common",
    _KEYRING: "debian-archive-keyring",
}


def name() -> str:
    """Return the base's name in the store; another name where anything about it is other."""
    override = os.environ.get("DDPJOB_BASE_IMAGE")
    if override:
        return override
    return f"localhost/ddpjob/base:{digest(_FORMAT, _SUITE, platform.machine(), *_PACKAGES)}"


def ensure(store: Store, log: Log) -> str:
    """Make the base image unless the store has it, and return its name; needs the lock."""
    base = name()
    if os.environ.get("DDPJOB_BASE_IMAGE") or store.has(base):
        return base
    with tempfile.TemporaryDirectory(prefix=".base.", dir=store.home) as aside:
        tree = Path(aside) / "tree"
        with timed("making the base image from Debian packages (1 to 2 minutes, once)", log):
            _debootstrap(tree)
            _shrink(tree)
            working = store.buildah(["from", "scratch"], "base image").strip()
            store.buildah(["add", "--quiet", working, str(tree), "/"], "base image")
            environment = ["--env", "LANG=C.UTF-8", "--cmd", "bash"]
            store.buildah(["config", *environment, working], "base image")
            store.buildah(["commit", "--quiet", "--rm", working, base], "base image")
    return base


def _debootstrap(tree: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}"]
    command += [f"--keyring={_KEYRING}", _SUITE, str(tree), *_mirror()]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("E:", "W:"))]
        said = " | ".join(lines[-3:]) or reason(done.stdout + done.stderr)
        raise Failure(
            f"debootstrap could not make the base image: {said}; it needs a Debian mirror (that of"
            " apt's sources, or its default), or set DDPJOB_BASE_IMAGE to an image to start from"
        )


def _mirror() -> list[str]:
    """Return the mirror that apt uses for this release of Debian; none: debootstrap's default."""
    if shutil.which("apt-get") is None:
        return []
    form = "$(ORIGIN) $(CODENAME) $(REPO_URI)"
    listed = host.run(["apt-get", "indextargets", "--format", form, "Identifier: Packages"])
    for line in listed.splitlines():
        origin, _, rest = line.partition(" ")
        codename, _, uri = rest.partition(" ")
        if (origin, codename) == ("Debian", _SUITE):
            return [uri]
    return []


def _environment() -> dict[str, str]:
    """Return the environment with apt's proxy, which debootstrap does not know of."""
    variables = dict(os.environ)
    if shutil.which("apt-config") is not None and "http_proxy" not in variables:
        shown = host.run(["apt-config", "dump", "--format", "%v%n", "Acquire::http::Proxy"])
        if shown.strip():
            variables["http_proxy"] = shown.strip()
    return variables


def _shrink(tree: Path) -> None:
    for useless in _USELESS:
        for entry in (tree / useless).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
