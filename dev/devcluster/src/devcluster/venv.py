"""The checkout's virtual environment: made once per set of pins, shared by checkouts.

`python -m devcluster.venv --link .venv` installs dev/requirements/dev.txt (every hash checked)
into the cache and points a symlink at it. Nothing of the checkout itself is installed;
sources are found through PYTHONPATH, so that two checkouts may share one environment.
`--also foreign` makes another environment, with foreign.txt on top; `--only release` one of
release.txt alone.
`--lock` writes the lock files from the *.in files instead; `--torch VERSION` takes another torch
than the pinned one, for `make torch-versions`.

uv does not read pip's configuration. A host behind a mirror or with its own certificates has set up
pip, so pip's settings (files and PIP_* variables) are passed on to uv, and to image builds, as
variables; the user's settings for uv itself win.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from devcluster import Failure, host
from devcluster.cachedir import Log, cache_root, digest, ensure_dir, timed

#: pip's setting -> uv's variable.
_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "HTTPS_PROXY",
}
#: Settings of uv itself that hold on other machines too.
UV_INDEX_VARIABLES = frozenset({"UV_DEFAULT_INDEX", "UV_INDEX", "UV_INSECURE_HOST"})
_ENVIRONMENT_SECTION = ":env:"


def pip_settings(python: str = sys.executable) -> dict[str, str]:
    """Return pip's effective settings by bare name; empty when this Python has no pip."""
    shown = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return parse_pip_settings(shown.stdout) if shown.returncode == 0 else {}


def parse_pip_settings(listing: str) -> dict[str, str]:
    """Parse `pip config list`, lines of section.name='value'; a PIP_* variable beats a file.

    Only the sections that hold for `pip install` count.
    """
    ranks = {"global": 0, "install": 1, _ENVIRONMENT_SECTION: 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, separator, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        rank = ranks.get(section)
        if not separator or rank is None:
            continue
        if name not in found or found[name][0] <= rank:
            found[name] = (rank, " ".join(str(ast.literal_eval(quoted)).split()))
    return {name: value for name, (_, value) in found.items()}


def reachable_from_elsewhere(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings without directories of this host, which a container does not see."""
    kept = dict(settings)
    links = [link for link in kept.pop("find-links", "").split() if link.startswith("http")]
    if links:
        kept["find-links"] = " ".join(links)
    return kept


def uv_environment(
    settings: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that make uv reach the index as pip does; none already set."""
    return {
        variable: settings[name]
        for name, variable in _SETTINGS.items()
        if settings.get(name) and variable not in environ
    }


def pip_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make another pip reach the index as this host's does."""
    return {
        f"PIP_{name.upper().replace('-', '_')}": settings[name]
        for name in _SETTINGS
        if name in settings and name != "default-timeout"
    }


_FORMAT = "1"
_NEEDED_GIBIBYTES = 8
#: To build a source archive would fetch and run build tools that no lock names.
_WHEELS = "--only-binary=:all:"
_COME_WITH_TORCH = ("torch==", "triton==", "nvidia-", "cuda-", "sympy==", "setuptools==")
#: Versions that win over what packages not ours ask for.
_OVERRIDES = "foreign-overrides.in"
#: Old versions of a few packages, to be put before those of foreign: no environment by itself.
_BROKEN = "foreign-broken"
#: dev comes first: it holds all the others, which then keep to its versions.
_LOCKS = (
    "dev", "uv", "build", "operator", "torch", "trainer", "foreign", _BROKEN, "release", "site",
)  # fmt: skip


def environment_dir(requirements: Path, names: Sequence[str] = ("dev",)) -> Path:
    """Return where the environment of these lock files and of this Python lives."""
    locks = [lock.read_bytes() for lock in _lock_files(requirements, names)]
    key = digest(_FORMAT, *locks, sys.version, sys.base_prefix, platform.machine())
    return cache_root() / f"venv-{key}"


def ensure_uv(requirements: Path, log: Log) -> Path:
    """Install the pinned uv into the cache, with pip, and return its environment."""
    lock = requirements / "uv.txt"
    home = cache_root() / f"uv-{digest(_FORMAT, lock.read_bytes(), sys.version, sys.base_prefix)}"

    def make(aside: Path) -> None:
        with timed("installing uv", log):
            _make_plain_venv(aside, log)
            pip = [str(aside / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
            pip += ["install", "--quiet", "--require-hashes", _WHEELS]
            _run([*pip, "--requirement", str(lock)])

    ensure_dir(home, make, log)
    return home


def ensure_environment(requirements: Path, log: Log, names: Sequence[str] = ("dev",)) -> Path:
    """Make the environment of lock files unless it is there, and return its directory."""
    # The locks are whole, and what _OVERRIDES overrules is not asked for again.
    words = ["--require-hashes", "--compile-bytecode", "--no-deps"]
    words += [f"--requirement={lock}" for lock in _lock_files(requirements, names)]
    home = environment_dir(requirements, names)
    what = "the virtual environment"
    return _ensure(home, requirements, what, log, lambda _: words, large="dev" in names)


def ensure_other_torch(requirements: Path, version: str, log: Log) -> Path:
    """Make an environment as dev.txt pins it, but for torch and what that brings along.

    uv's cache shares the files of what several versions need alike.
    """
    lock = (requirements / "dev.txt").read_text()
    key = digest(_FORMAT, lock.encode(), version, sys.version, sys.base_prefix, platform.machine())
    pins = [line.rstrip(" \\") for line in lock.splitlines() if "==" in line and line[0] != " "]
    kept = [pin for pin in pins if not pin.startswith(_COME_WITH_TORCH)]

    def words(aside: Path) -> list[str]:
        constraints, override = aside / "constraints.txt", aside / "override.txt"
        constraints.write_text("\n".join(kept))
        override.write_text(f"torch=={version}")
        given = ["--constraint", str(constraints), "--override", str(override)]
        return [*given, "--requirement", str(requirements / "dev.in")]

    home = cache_root() / f"venv-torch-{version}-{key}"
    return _ensure(home, requirements, f"an environment with torch {version}", log, words)


def _ensure(
    home: Path, requirements: Path, what: str, log: Log, words: Callable[[Path], list[str]],
    *, large: bool = True,
) -> Path:  # fmt: skip
    """Make an environment unless it is there, with what `uv pip install` of ``words`` brings."""
    if home.is_dir():
        return home
    uv_home = ensure_uv(requirements, log)
    uv, variables = str(uv_home / "bin/uv"), uv_variables(uv_home)
    if large:
        host.require_space(home.parent, _NEEDED_GIBIBYTES, what, "DDPJOB_CACHE")
        what += " (about 5 GB: torch carries the CUDA libraries)"

    def make(aside: Path) -> None:
        create = [uv, "venv", "--quiet", "--clear", "--relocatable", "--python", sys.executable]
        install = [uv, "pip", "install", _WHEELS, "--python", str(aside / "bin/python")]
        with timed(f"making {what}", log):
            _run([*create, str(aside)], variables)
            _run([*install, *words(aside)], variables)

    ensure_dir(home, make, log)
    return home


def write_locks(requirements: Path, options: Sequence[str], log: Log) -> None:
    """Resolve every *.in file to a lock file with hashes, all at the same versions."""
    uv = ensure_uv(requirements, log)
    compile_one = [str(uv / "bin/uv"), "pip", "compile", "--quiet", "--universal"]
    compile_one += ["--python-version", "3.11", "--generate-hashes", "--no-emit-index-url", _WHEELS]
    compile_one += ["--custom-compile-command", "make lock"]
    for name in _LOCKS:
        common = [] if name == "dev" else ["--constraint", "dev.txt"]
        common += ["--override", _OVERRIDES] if name == "foreign" else []
        common = ["--no-deps"] if name == _BROKEN else common
        chosen = [*options, "--output-file", f"{name}.txt", f"{name}.in"]
        with timed(f"pinning {name}.txt", log):
            _run([*compile_one, *common, *chosen], uv_variables(uv), requirements)


def point(link: Path, target: Path) -> None:
    """Make symlink ``link`` point at ``target``, atomically."""
    if link.is_symlink() and link.readlink() == target:
        return
    if link.exists() and not link.is_symlink():
        raise Failure(f"{link} is not a symlink of ours: move it away and try again")
    aside = link.with_name(f"{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.rename(link)


def _lock_files(requirements: Path, names: Sequence[str]) -> list[Path]:
    return [requirements / f"{name}.txt" for name in names]


def uv_variables(uv: Path) -> dict[str, str]:
    """Return the environment for uv: its cache in ours, the index as pip knows it."""
    # A Python of the system may come without pip; the one beside uv reads the same files.
    settings = pip_settings() or pip_settings(str(uv / "bin/python"))
    variables = uv_environment(settings)
    return {**os.environ, **variables, "UV_CACHE_DIR": str(cache_root() / "uv")}


def _make_plain_venv(home: Path, log: Log) -> None:
    """Make a venv with pip; Debian keeps the modules for that in a separate package."""
    command = [sys.executable, "-m", "venv", "--clear", str(home)]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    if os.geteuid() != 0:
        raise Failure(f"this Python cannot make virtual environments: install {package}")
    host.ensure_packages({f"{sysconfig.get_path('stdlib')}/ensurepip": package}, log)
    _run(command)


def _run(
    command: Sequence[str], variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run a command with its output shown."""
    if subprocess.run(command, env=variables, cwd=cwd, check=False).returncode != 0:
        raise Failure(
            f"`{' '.join(command[:3])} ...` failed, see above; where the package index could not"
            " be reached, set up pip for this host (`pip config`) and run `make setup` again"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Make the environment and point the link at it, or write the lock files."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.venv", description=__doc__)
    parser.add_argument("--requirements", type=Path, default=Path("dev/requirements"))
    parser.add_argument("--link", type=Path, help="symlink to point at the environment")
    parser.add_argument("--also", action="append", default=[], help="a lock file beside dev.txt")
    parser.add_argument("--only", metavar="NAME", help="a lock file instead of dev.txt")
    parser.add_argument("--torch", metavar="VERSION", help="take this torch instead of the pinned")
    parser.add_argument("--lock", action="store_true", help="write the lock files instead")
    arguments, options = parser.parse_known_args(words)
    if options and not arguments.lock:
        parser.error(f"unknown: {' '.join(options)} (with --lock it would go to uv)")

    def say(line: str) -> None:
        print(f"==> {line}", file=sys.stderr, flush=True)

    try:
        if arguments.lock:
            write_locks(arguments.requirements, options, say)
            return 0
        requirements = arguments.requirements.resolve()
        if arguments.torch is not None:
            home = ensure_other_torch(requirements, arguments.torch, say)
        else:
            names = [arguments.only or "dev", *arguments.also]
            home = ensure_environment(requirements, say, names)
        if arguments.link is not None:
            point(arguments.link, home)
    except Failure as failure:
        print(f"setup: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
