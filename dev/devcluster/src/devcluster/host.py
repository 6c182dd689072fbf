"""The host as devcluster needs it: root, Debian packages, disk space; and commands run on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from devcluster import Failure
from devcluster.cachedir import LOCKS, Log, locked, timed

#: A program or a file that tells that a package is installed -> the package.
PACKAGES: dict[str, str] = {"ip": "iproute2", "openssl": "openssl"}
NODE_PACKAGES: dict[str, str] = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "bridge": "iproute2",
    "nsenter": "util-linux",
    "nft": "nftables",
    "conntrack": "conntrack",
    "/usr/share/doc/busybox-static": "busybox-static",
}
_SYSTEMD = Path("/run/systemd/system")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run(
    argv: Sequence[str | Path],
    why: str = "",
    timeout: float = 120,
    cwd: Path | None = None,
    text: str = "",
) -> str:
    """Run a command that reads ``text`` and return its output.

    A failure says ``why`` and the last line that the command said.
    """
    command = [str(word) for word in argv]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{why or command[0]}: no answer within {timeout:.0f} s") from error
    except FileNotFoundError as error:
        raise Failure(f"{why or command[0]}: {command[0]} is not installed") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        said = words[-1] if words else f"exit status {done.returncode}"
        raise Failure(f"{why or ' '.join(command[:4])}: {said}")
    return done.stdout


def output(argv: Sequence[str | Path]) -> str | None:
    """Run a command that may fail; return its output, None when it failed."""
    command = [str(word) for word in argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def require_root() -> None:
    """Fail unless this is root on Linux."""
    if os.uname().sysname != "Linux":
        raise Failure("devcluster needs Linux: it makes network namespaces and containers")
    if os.geteuid() != 0:
        raise Failure("devcluster needs root: run it with sudo, or as root")
    # A root shell got by plain `su` may lack the sbin directories that ip and nft live in.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{_PATH}"


def missing_packages(wanted: Mapping[str, str]) -> list[str]:
    """Return the packages of which a file is missing."""
    return sorted(
        {
            package
            for file, package in wanted.items()
            if not (Path(file).exists() if file.startswith("/") else shutil.which(file))
        }
    )


def ensure_packages(wanted: Mapping[str, str], log: Log) -> None:
    """Install what is missing with apt-get."""
    missing = missing_packages(wanted)
    if not missing:
        return
    listed = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise Failure(f"missing programs, and no apt-get to install them with: install {listed}")
    with locked(LOCKS / "apt.lock", log):
        missing = missing_packages(wanted)  # another process may have installed them meanwhile
        if not missing:
            return
        no_containerd = shutil.which("containerd") is None
        with timed(f"installing Debian packages: {' '.join(missing)}", log):
            said = _apt_get("update") + _apt_get("install", "--no-install-recommends", *missing)
        left = missing_packages(wanted)
        installed = no_containerd and "containerd" in missing and "containerd" not in left
        if installed and _SYSTEMD.is_dir():  # the host's own: the nodes run theirs
            output(["systemctl", "disable", "--now", "containerd"])
    if left:
        raise Failure(
            f"could not install {' '.join(left)}: {' | '.join(said) or 'apt-get failed'};"
            " check the network and run `apt-get install` by hand to see more"
        )


def _apt_get(verb: str, *words: str) -> list[str]:
    """Run apt-get, waiting for one that runs already; return its last error, if any."""
    done = subprocess.run(
        ["apt-get", verb, "-y", "-qq", "-o", "DPkg::Lock::Timeout=600", *words],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))]
    return [f"apt-get {verb}: {lines[-1]}"] if lines else []


def require_space(directory: Path, gibibytes: int, what: str, variable: str) -> None:
    """Fail unless the disk under ``directory`` has that much room."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < gibibytes << 30:
        raise Failure(
            f"{what} needs {gibibytes} GiB of disk and {existing} has {free / (1 << 30):.1f} free:"
            f" free some, or set {variable} to a directory on a larger disk"
        )
