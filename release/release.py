"""Build all that a release consists of into one directory, the same bytes from the same commit.

    make release                       into dist/ddpjob-VERSION
    make release ARGS=--draft          of a tree that is not ready; the notes say what is missing
    make release ARGS=--without-images chart, wheels, plugin, manifests, bills of materials

What it refuses and what differs between two builds is in docs/internals/releasing.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from devcluster import baseimage, binaries, images, venv
from devcluster.failure import Failure

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {
    "operator": "ddpjob_operator",
    "trainer": "ddpjob_trainer",
    "plugin": "kubectl_ddp",
}
#: In each of them.
CONTRACT = "ddpjob_contract"
WHEELS = ("operator", "trainer")
#: The lock files that each image is made of.
BILLS = {"operator": ("operator",), "trainer": ("torch", "trainer")}
SUMS = "SHA256SUMS"
#: 1980, before which no file of a zip can be.
ZIP_BEGINS = 315532800


def say(line: str) -> None:
    """Show progress."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each place of the checkout names."""

    def read(path: str, pattern: str) -> None:
        values = re.findall(pattern, (root / path).read_text(), re.MULTILINE)
        found[path] = " and ".join(dict.fromkeys(values)) or "none"

    found: dict[str, str] = {}
    for folder, package in DISTRIBUTIONS.items():
        about = tomllib.loads((root / folder / "pyproject.toml").read_text())
        found[f"{folder}/pyproject.toml"] = about["project"]["version"]
        read(f"{folder}/src/{package}/__init__.py", r'^__version__ = "(.+)"$')
    read("charts/ddpjob/Chart.yaml", r'^(?:version|appVersion): "?([^"\s]+)"?$')
    read("Dockerfile", r'org\.opencontainers\.image\.version="(.+?)"')
    read("devcluster/src/devcluster/images.py", r'^VERSION = "(.+)"$')
    found["CHANGELOG.md"] = newest_section(root)[0]
    return found


def newest_section(root: Path = ROOT) -> tuple[str, str, str]:
    """Return version, date and text of the changelog's first section."""
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(
        r"^## (\d+\.\d+\.\d+) - (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise Failure("CHANGELOG.md has no section `## X.Y.Z - DATE`: write one")
    return found[1], found[2], found[3].strip()


def one_version(found: Mapping[str, str]) -> str:
    """Return the version; refuse places that disagree."""
    if len(set(found.values())) != 1:
        listed = ", ".join(f"{place} {version}" for place, version in found.items())
        raise Failure(f"the versions disagree: {listed}; set all to one")
    return next(iter(found.values()))


def not_ready(root: Path, date: str, with_images: bool) -> list[str]:
    """Return what keeps the checkout from being released, each with its cure."""
    status = git(root, "status", "--porcelain")
    found = []
    if status is None:
        found.append("this is no git checkout: release from a clone")
    elif status:
        changed = ", ".join(line[3:] for line in status.splitlines()[:5])
        found.append(f"the tree has changes that are not committed ({changed}): commit them")
    # Helm packs what git ignores.
    ignored = git(root, "ls-files", "-oi", "--exclude-standard", "charts/ddpjob") or ""
    if ignored:
        found.append(f"files that git ignores are in the chart ({ignored.split()[0]}): remove them")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md dates the version {date!r}: write the day, YYYY-MM-DD")
    if with_images and "@sha256:" not in baseimage.name():
        found.append(
            f"the base image {baseimage.name()} has no digest: set"
            " DDPJOB_BASE_IMAGE=NAME@sha256:... (docs/internals/releasing.md)"
        )
    return found


def git(root: Path, *words: str) -> str | None:
    """Return what git says; None where there is no repository."""
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def epoch(root: Path = ROOT) -> int:
    """Return the time that everything made here carries: that of the newest commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH") or git(root, "log", "-1", "--format=%ct")
    if not given:
        raise Failure("no git checkout: set SOURCE_DATE_EPOCH to the seconds to stamp files with")
    if not given.isdecimal():
        raise Failure(f"SOURCE_DATE_EPOCH is {given!r}: give whole seconds since 1970")
    return int(given)


def run(command: Sequence[str | Path], what: str, **variables: str) -> None:
    """Run a tool; a failure carries its words."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failure(f"{what} failed: {(done.stderr or done.stdout).strip()[-2000:]}")


def wheels(root: Path, out: Path, when: int) -> None:
    """Build the wheels, with build tools whose hashes requirements/build.txt knows."""
    uv = venv.ensure_uv(root / "requirements", say)
    variables = {**venv.uv_variables(uv), "SOURCE_DATE_EPOCH": str(when)}
    for folder in WHEELS:
        command: list[str | Path] = [
            uv / "bin/uv",
            "build",
            "--quiet",
            "--wheel",
            "--no-create-gitignore",
        ]
        command += ["--python", sys.executable, "--require-hashes"]
        command += ["--build-constraints", root / "requirements/build.txt"]
        run([*command, "--out-dir", out, root / folder], f"the wheel of {folder}/", **variables)


def plugin(root: Path, out: Path, when: int) -> None:
    """Write kubectl-ddp: a zip of Python's own modules only, that a shell can start."""
    sources = ((root / "plugin/src", DISTRIBUTIONS["plugin"]), (root / "contract/src", CONTRACT))
    package = DISTRIBUTIONS["plugin"]
    start = f"import sys\nimport {package}.__main__\nsys.exit({package}.__main__.main())\n"
    files = {
        str(path.relative_to(source)): path.read_text()
        for source, name in sources
        for path in sorted((source / name).rglob("*.py"))
    }
    stamp = datetime.fromtimestamp(max(when, ZIP_BEGINS), UTC).timetuple()[:6]
    target = out / "kubectl-ddp"
    with target.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in {"__main__.py": start, **files}.items():
                about = zipfile.ZipInfo(name, stamp)
                about.compress_type = zipfile.ZIP_DEFLATED
                about.external_attr = 0o644 << 16
                archive.writestr(about, text)
    target.chmod(0o755)


def chart(root: Path, out: Path, when: int) -> None:
    """Let helm check and pack the chart, then give its files the commit's time."""
    helm = binaries.ensure(["helm"], say)["helm"]
    with tempfile.TemporaryDirectory() as aside:
        run([helm, "package", root / "charts/ddpjob", "--destination", aside], "helm package")
        [packed] = Path(aside).iterdir()
        restamped = io.BytesIO()
        with (
            tarfile.open(packed) as before,
            tarfile.open(fileobj=restamped, mode="w", format=tarfile.USTAR_FORMAT) as after,
        ):
            for member in sorted(before, key=lambda each: each.name):
                plain = tarfile.TarInfo(member.name)
                plain.size, plain.mtime, plain.mode = member.size, when, 0o644
                after.addfile(plain, before.extractfile(member))
        (out / packed.name).write_bytes(gzip.compress(restamped.getvalue(), mtime=0))


def bills(root: Path, out: Path, when: int) -> None:
    """Write what each image's Python packages are, as CycloneDX, out of the lock files."""
    home = venv.ensure_environment(root / "requirements", say, ["release"])
    for image, locks in BILLS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
            lock.writelines((root / f"requirements/{name}.txt").read_text() for name in locks)
            lock.flush()
            command: list[str | Path] = [
                home / "bin/cyclonedx-py",
                "requirements",
                "--output-reproducible",
                "--no-validate",
            ]
            command += ["--pyproject", root / image / "pyproject.toml", "--of", "JSON"]
            command += ["-o", out / f"{image}.cdx.json", lock.name]
            run(command, f"the bill of materials of {image}", SOURCE_DATE_EPOCH=str(when))


def archives(out: Path, version: str) -> list[str]:
    """Write the images as OCI archives; return name and digest of each."""
    told = []
    for target in images.TARGETS:
        archive = out / f"ddpjob-{target}-{version}.oci.tar"
        digest = images.export(target, archive, say)
        told.append(f"{images.reference(target)}@{digest}")
    return told


def notes(version: str, date: str, text: str, lacking: Sequence[str], told: Sequence[str]) -> str:
    """Return the release notes: the changelog's section, and what was built from what."""
    lines = [f"# ddpjob {version} ({date})", ""]
    if lacking:
        lines += ["**Draft, not for use:**", "", *(f"- {each}" for each in lacking), ""]
    lines += [text.replace("\n### ", "\n## ").replace("### ", "## ", 1), ""]
    if told:
        lines += ["## Images", "", *(f"- `{each}`" for each in told)]
        lines += [f"- from the base `{baseimage.name()}`", ""]
    lines += [f"`sha256sum --check {SUMS}` checks the files.", ""]
    return "\n".join(lines)


def write_sums(out: Path) -> None:
    """Write the checksum of every file."""
    lines = []
    for path in sorted(out.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (out / SUMS).write_text("".join(lines))


def release(root: Path, out: Path, draft: bool, with_images: bool) -> None:
    """Build everything aside, and put it in the place of what an earlier call made."""
    version = one_version(versions(root))
    _, date, text = newest_section(root)
    lacking = not_ready(root, date, with_images)
    if lacking and not draft:
        raise Failure("; ".join(lacking) + " (or make a draft: ARGS=--draft)")
    when = epoch(root)
    whole = out / f"ddpjob-{version}"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".release.", dir=out) as aside:
        made = Path(aside) / whole.name
        made.mkdir()
        for part in (wheels, plugin, chart, bills):
            part(root, made, when)
        for name in ("crd.yaml", "install.yaml"):
            shutil.copyfile(root / "manifests" / name, made / name)
        told = archives(made, version) if with_images else []
        (made / "RELEASE_NOTES.md").write_text(notes(version, date, text, lacking, told))
        write_sums(made)
        if whole.exists():
            shutil.rmtree(whole)
        made.rename(whole)
    for each in lacking:
        say(f"draft: {each}")
    print(f"{whole}:\n{(whole / SUMS).read_text()}", end="")


def main(words: Sequence[str] | None = None) -> int:
    """Make a release, or a part of it."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="?", choices=("wheels", "plugin"), help="only this")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="(default: dist)")
    parser.add_argument("--draft", action="store_true", help="build what is not ready, too")
    parser.add_argument("--without-images", action="store_true", help="leave out the OCI archives")
    arguments = parser.parse_args(words)
    out: Path = arguments.out
    try:
        if arguments.part is None:
            release(ROOT, out, arguments.draft, not arguments.without_images)
        else:
            out.mkdir(parents=True, exist_ok=True)
            {"wheels": wheels, "plugin": plugin}[arguments.part](ROOT, out, epoch())
    except (Failure, OSError) as failure:  # OSError: --out cannot be written
        print(f"release: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
