"""The programs: found when the machine has them in the right version, else built and cached.

Every Kubernetes component, etcd and kubectl are one binary built from its folder kube, and CoreDNS
is another, with only the plugins that are used; Helm, KWOK and Kueue come by `go install` at pinned
versions. Each build is kept in the cache under a hash of all that it was made from.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from devcluster import Failure, host
from devcluster.cachedir import Log, cache_root, digest, ensure_dir, timed

KUBERNETES = "v1.36.3"
#: Names a directory with servers of another version, to try what holds there.
OTHER_CONTROL_PLANE = "DDPJOB_CONTROL_PLANE"
COREDNS = "v1.14.1"  # newer ones would raise what Kubernetes is built from
MODULES = {
    "cosign": ("github.com/sigstore/cosign/v3/cmd/cosign", "v3.1.3"),
    "crane": ("github.com/google/go-containerregistry/cmd/crane", "v0.22.1"),
    "helm": ("helm.sh/helm/v4/cmd/helm", "v4.3.1"),
    "kueue": ("sigs.k8s.io/kueue/cmd/kueue", "v0.17.0"),
    "kwok": ("sigs.k8s.io/kwok/cmd/kwok", "v0.8.0"),
}
SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONTROL_PLANE = ("etcd", *SERVERS, "kubectl")
NODE = ("kubelet", "kube-proxy", "coredns")
KUBE = (*CONTROL_PLANE, *NODE)
TOOLBOX = (*KUBE, "helm")  # what the tests need; the others are built when asked for
_SOURCE = Path(__file__).resolve().parents[2] / "kube"
_GO = (1, 26)
_OLDEST_ETCD = (3, 5)
_MAJOR, _MINOR = KUBERNETES.removeprefix("v").split(".")[:2]
_VERSION = "k8s.io/component-base/version"
_KUBE_FLAGS = (
    f"-s -w -X {_VERSION}.gitVersion={KUBERNETES}"
    f" -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}"
)
_OFFLINE = re.compile(r"dial tcp|lookup .*:|no such host|connection refused|i/o timeout|TLS hand")


def ensure(names: Iterable[str], log: Log) -> dict[str, Path]:
    """Return the path of each named program, building what is missing."""
    wanted = list(dict.fromkeys(names))
    kube = [name for name in wanted if name in KUBE]
    found = _installed(kube) if kube else {}
    if kube and not found:
        home = _build_kube(log)
        found = {name: home / name for name in kube}
    for name in wanted:
        if name in MODULES:
            found[name] = _installed([name]).get(name) or _build_module(name, log) / name
    others = _other_servers()
    return {name: others.get(name, path) for name, path in found.items()}


def _other_servers() -> dict[str, Path]:
    directory = os.environ.get(OTHER_CONTROL_PLANE)
    if not directory:
        return {}
    places = {name: Path(directory).resolve() / name for name in SERVERS}
    found = {name: place for name, place in places.items() if os.access(place, os.X_OK)}
    if not found:
        raise Failure(
            f"{OTHER_CONTROL_PLANE}={directory}: none of {', '.join(SERVERS)} is there;"
            " name the directory of a control plane's programs"
        )
    return found


def minor_of(program: Path) -> int:
    """Return the minor version of a Kubernetes component: 36 of v1.36.3."""
    version = _version_of(program)
    match = re.search(r"v1\.(\d+)", version)
    if match is None:
        raise Failure(f"{program} --version says {version.strip()!r}: it is no Kubernetes program")
    return int(match[1])


def toolbox(log: Log) -> Path:
    """Return a directory with the programs in it, and `kube` when it was built."""
    programs = ensure(TOOLBOX, log)
    built = programs["kubelet"].with_name("kube")
    if built.exists():
        programs["kube"] = built
    home = cache_root() / "bin" / digest(*(f"{name}={path}" for name, path in programs.items()))

    def make(aside: Path) -> None:
        for name, path in programs.items():
            (aside / name).symlink_to(path)

    ensure_dir(home, make, log)
    return home


def _candidates(name: str) -> list[Path]:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    places = [shutil.which(name, path=assets)] if assets else []
    return [Path(place) for place in [*places, shutil.which(name)] if place]


def _version_of(program: Path) -> str:
    """Return what a program says of its version; empty when it does not run."""
    arguments = {name: ["version"] for name in ("helm", "cosign", "crane")}
    arguments["kubectl"] = ["version", "--client"]
    try:
        done = subprocess.run(
            [str(program), *arguments.get(program.name, ["--version"])],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def is_suitable(name: str, version: str) -> bool:
    """Tell whether a program that prints ``version`` may stand in for the one we would build."""
    if name == "etcd":
        match = re.search(r"etcd Version: (\d+)\.(\d+)", version)
        return match is not None and (int(match[1]), int(match[2])) >= _OLDEST_ETCD
    wanted = COREDNS if name == "coredns" else KUBERNETES
    if name in MODULES:
        wanted = MODULES[name][1]
    pattern = rf"(?<![\w.])v?{re.escape(wanted.removeprefix('v'))}(?![\w.+-])"
    return re.search(pattern, version) is not None


def _installed(names: list[str]) -> dict[str, Path]:
    """Return suitable installed programs if all of ``names`` are there, else none."""
    found: dict[str, Path] = {}
    for name in names:
        for candidate in _candidates(name):
            if is_suitable(name, _version_of(candidate)):
                found[name] = candidate
                break
        else:
            return {}
    return found


def _go() -> tuple[str, str]:
    """Return the go command and its version; Failure when it is missing or too old."""
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    wanted = f"{_GO[0]}.{_GO[1]}"
    if go is None:
        raise Failure(
            f"Go is not installed, and the cluster is built from source: install Go {wanted}"
            " or newer and put it on PATH"
        )
    # Go wants HOME, which a service or a container may lack.
    version = host.run(["env", f"HOME={Path.home()}", go, "env", "GOVERSION"], cwd=_SOURCE).strip()
    match = re.match(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < _GO:
        raise Failure(f"{go} is {version}: install Go {wanted} or newer and put it on PATH")
    return go, version


def _build(
    name: str,
    version: str,
    command: list[str],
    directory: Path,
    variables: dict[str, str],
    log: Log,
) -> None:
    """Run a go command; on failure end with what it said last, and what to do."""
    host.require_space(cache_root(), 8, f"building {name}", "DDPJOB_CACHE (and GOCACHE, GOPATH)")
    variables = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", **variables}
    environment = {**os.environ, "HOME": str(Path.home()), **variables}
    with timed(f"building {name} {version} (once; minutes)", log):
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if "downloading" not in line]
        said = words[-1] if words else f"exit status {done.returncode}"
        cure = (
            "no Go modules could be fetched: check the network and GOPROXY, and try again"
            if _OFFLINE.search(done.stderr)
            else "the compiler failed"
        )
        raise Failure(f"building {name} {version}: {cure} ({said.strip()})")


def _build_kube(log: Log) -> Path:
    go, version = _go()
    files = ("go.mod", "go.sum", "main.go", "coredns/main.go")
    sources = [(_SOURCE / file).read_bytes() for file in files]
    key = digest(*sources, _KUBE_FLAGS, version, platform.machine())
    home = cache_root() / "bin" / f"kube-{key}"

    def make(aside: Path) -> None:
        command = [go, "build", "-trimpath", "-ldflags", _KUBE_FLAGS, "-o", f"{aside}/"]
        _build("kube", KUBERNETES, [*command, ".", "./coredns"], _SOURCE, {}, log)
        for name in set(KUBE) - {"coredns"}:
            (aside / name).symlink_to("kube")
        log(f"kube: {(aside / 'kube').stat().st_size / 1e6:.0f} MB")

    ensure_dir(home, make, log)
    return home


def _build_module(name: str, log: Log) -> Path:
    go, go_version = _go()
    module, version = MODULES[name]
    home = (
        cache_root() / "bin" / f"{name}-{digest(module, version, go_version, platform.machine())}"
    )

    def make(aside: Path) -> None:
        command = [go, "install", "-trimpath", "-ldflags", "-s -w", f"{module}@{version}"]
        _build(name, version, command, aside, {"GOBIN": str(aside)}, log)
        log(f"{name}: {(aside / name).stat().st_size / 1e6:.0f} MB")

    ensure_dir(home, make, log)
    return home


def module_directory(name: str) -> Path:
    """Return the sources of a program's module, from Go's cache: they hold its chart too."""
    go, _ = _go()
    package, version = MODULES[name]
    module = package.partition("/cmd/")[0]
    command = ["env", f"HOME={Path.home()}", "GOFLAGS=", "GOWORK=off", go, "mod", "download"]
    facts = host.run([*command, "-json", f"{module}@{version}"], f"the sources of {name}")
    return Path(json.loads(facts)["Dir"])
