"""Build all that a release consists of into one directory, the same bytes from the same commit.

    make release                       into dist/ddpjob-VERSION
    make release ARGS=--draft          of a tree that is not ready; the notes say what is missing
    make release ARGS=--without-images chart, wheels, plugin, manifests, bills of materials
    make base-image                    pin the base image in the Dockerfile by its digest of today

What it refuses and what differs between two builds is in docs/internals/releasing.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
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
from typing import Any
from urllib.parse import quote

from devcluster import Failure, binaries, venv
from devcluster.oci import baseimage, images, imagestore

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "contract": "ddpjob_contract",
    "operator": "ddpjob_operator",
    "trainer": "ddpjob_trainer",
    "plugin": "kubectl_ddp",
}
#: Which the others need, in their own version.
CONTRACT = "ddpjob-contract"
#: The lock files that each image is made of.
BILLS = {"operator": ("operator",), "trainer": ("torch", "trainer")}
SUMS = "SHA256SUMS"
PROVENANCE = "provenance.json"
#: What the Dockerfile starts from; `make base-image` writes the digest.
BASE = re.compile(r"^(ARG BASE_IMAGE=)(\S+)$", re.MULTILINE)
PINNED = re.compile(r"@sha256:([0-9a-f]{64})$")
PYTHON = re.compile(r'"PYTHON_VERSION=([^"]+)"')
#: Names that docs/internals/releasing.md explains. No page needs to be there.
BUILD_TYPE, BUILDER = "tag:ddpjob.dev,2026:release/1", "tag:ddpjob.dev,2026:make-release"
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
        if folder != "contract":
            needed = (each.partition("==") for each in about["project"]["dependencies"])
            pins = " and ".join(version for name, _, version in needed if name == CONTRACT)
            found[f"{folder}/pyproject.toml ({CONTRACT})"] = pins or "none"
        read(f"{folder}/src/{package}/__init__.py", r'^__version__ = "(.+)"$')
    read("charts/ddpjob/Chart.yaml", r'^(?:version|appVersion): "?([^"\s]+)"?$')
    read("Dockerfile", r'org\.opencontainers\.image\.version="(.+?)"')
    read("dev/devcluster/src/devcluster/oci/images.py", r'^VERSION = "(.+)"$')
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
    if with_images and PINNED.search(baseimage.name()) is None:
        found.append(
            f"the base image {baseimage.name()} has no digest: run `make base-image` and commit,"
            " or set DDPJOB_BASE_IMAGE=NAME@sha256:... (docs/internals/releasing.md)"
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


def run(command: Sequence[str | Path], what: str, **variables: str) -> str:
    """Run a tool and return its output; a failure carries its words."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failure(f"{what} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def pin_base(root: Path) -> str:
    """Ask the registry for the digest of the Dockerfile's base, and write it there."""
    crane = binaries.ensure(["crane"], say)["crane"]
    text = (root / "Dockerfile").read_text()
    [(_, known)] = BASE.findall(text)
    name = known.partition("@")[0]
    pinned = f"{name}@{run([crane, 'digest', name], f'asking for the digest of {name}').strip()}"
    if PINNED.search(pinned) is None:
        raise Failure(f"the registry answered {pinned!r}, which is no digest: nothing is changed")
    (root / "Dockerfile").write_text(BASE.sub(rf"\g<1>{pinned}", text))
    return pinned


def wheels(root: Path, out: Path, when: int) -> None:
    """Build the wheels, with build tools whose hashes dev/requirements/build.txt knows."""
    uv = venv.ensure_uv(root / "dev/requirements", say)
    variables = {**venv.uv_variables(uv), "SOURCE_DATE_EPOCH": str(when)}
    for folder in DISTRIBUTIONS:
        command: list[str | Path] = [
            uv / "bin/uv",
            "build",
            "--quiet",
            "--wheel",
            "--no-create-gitignore",
        ]
        command += ["--python", sys.executable, "--require-hashes", "--no-build"]
        command += ["--build-constraints", root / "dev/requirements/build.txt"]
        run([*command, "--out-dir", out, root / folder], f"the wheel of {folder}/", **variables)


def plugin(root: Path, out: Path, when: int) -> None:
    """Write kubectl-ddp: a zip of Python's own modules only, that a shell can start."""
    package = DISTRIBUTIONS["plugin"]
    start = f"import sys\nimport {package}.__main__\nsys.exit({package}.__main__.main())\n"
    files = {
        str(path.relative_to(source)): path.read_text()
        for source in (root / "plugin/src", root / "contract/src")
        for path in sorted(source.rglob("*.py"))
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
    """Write what Python packages each image has, as CycloneDX, out of the lock files."""
    home = venv.ensure_environment(root / "dev/requirements", say, ["release"])
    for image, locks in BILLS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
            lock.writelines((root / f"dev/requirements/{name}.txt").read_text() for name in locks)
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


def base_packages(image: imagestore.BuiltImage) -> list[dict[str, str]]:
    """Return what the base gave an image, as components of CycloneDX."""
    layers = [layer.directory.resolve() for layer in image.layers]  # the lowest first

    def read(name: str) -> str:
        """Return a file of the image: that of the upmost layer that has it."""
        for layer in reversed(layers):
            path = (layer / name).resolve()
            if path.is_file() and path.is_relative_to(layer):  # not one of this machine
                return path.read_text()
        raise Failure(
            f"the image has no /{name}: choose a base of Debian or alike, or its bill lies"
        )

    about = dict(re.findall(r'^(\w+)="?(.*?)"?$', read("usr/lib/os-release"), re.MULTILINE))
    system, number = about.get("ID", "linux"), about.get("VERSION_ID", "")
    found = [{"type": "operating-system", "name": system, "version": number}]
    for entry in read("var/lib/dpkg/status").split("\n\n"):
        package = dict(re.findall(r"^([\w-]+): *(.*)$", entry, re.MULTILINE))
        if not package.get("Status", "").endswith(" installed"):
            continue
        name, version = package["Package"], package["Version"]
        # Debian's advisories are about the source package.
        source = re.sub(r" \((.+)\)", r"@\1", package.get("Source", ""))
        purl = f"pkg:deb/{system}/{quote(name)}@{quote(version, safe=':')}"
        purl += f"?arch={package['Architecture']}&distro={system}-{number}"
        purl += f"&upstream={quote(source, safe=':')}" if source else ""
        found.append({"type": "library", "name": name, "version": version, "purl": purl})
    # Python and its pip, where they are not Debian's: as in docker.io/library/python.
    kinds = [("generic", "python", version) for version in PYTHON.findall(image.config)]
    for layer in layers:
        about_each = sorted(layer.glob("usr/local/lib/python3*/site-packages/*.dist-info"))
        kinds += [("pypi", *path.stem.rpartition("-")[::2]) for path in about_each]
    for kind, name, version in kinds:
        purl = f"pkg:{kind}/{name.lower().replace('_', '-')}@{quote(version)}"
        found.append({"type": "library", "name": name, "version": version, "purl": purl})
    return list({each.get("purl", "base"): each for each in found}.values())


def archives(out: Path, version: str) -> list[str]:
    """Write the images as OCI archives, the base into their bills; return them with digests."""
    names = []
    for target in images.TARGETS:
        archive = out / f"ddpjob-{target}-{version}.oci.tar"
        digest = images.export(target, archive, say)
        names.append(f"{images.reference(target)}@{digest}")
        path = out / f"{target}.cdx.json"
        bill = json.loads(path.read_text())
        for each in base_packages(images.build(target, say)):
            bill["components"].append({"bom-ref": each.get("purl", "base"), **each})
        path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n")
    return names


def provenance(
    root: Path, out: Path, version: str, lacking: Sequence[str], names: Sequence[str]
) -> None:
    """Write what was made, of what and by what: an in-toto statement of SLSA, to be signed."""
    subjects = [
        {"name": path.name, "digest": {"sha256": sha256(path)}} for path in sorted(out.iterdir())
    ]
    for each in names:
        name, _, digest = each.partition("@sha256:")
        subjects.append({"name": name, "digest": {"sha256": digest}})
    made_of: list[dict[str, Any]] = [
        {"name": str(path.relative_to(root)), "digest": {"sha256": sha256(path)}}
        for path in [root / "Dockerfile", *sorted((root / "dev/requirements").glob("*.txt"))]
    ]
    commit = git(root, "rev-parse", "HEAD")
    if commit:
        made_of.insert(0, {"name": "commit", "digest": {"gitCommit": commit}})
    if names:
        pin = PINNED.search(baseimage.name())
        base: dict[str, Any] = {"uri": f"docker://{baseimage.name()}"}
        made_of.append(base | ({"digest": {"sha256": pin[1]}} if pin else {}))
    module, tag = binaries.MODULES["helm"]
    made_of.append({"uri": f"pkg:golang/{module}@{tag}"})
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": version, "images": bool(names), "draft": lacking},
                "internalParameters": {
                    "machine": platform.machine(),
                    "python": platform.python_version(),
                },
                "resolvedDependencies": made_of,
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }
    (out / PROVENANCE).write_text(json.dumps(statement, indent=2) + "\n")


def notes(version: str, date: str, text: str, lacking: Sequence[str], names: Sequence[str]) -> str:
    """Return the release notes: the changelog's section, and what was built from what."""
    lines = [f"# ddpjob {version} ({date})", ""]
    if lacking:
        lines += ["**Draft, not for use:**", "", *(f"- {each}" for each in lacking), ""]
    lines += [text.replace("\n### ", "\n## ").replace("### ", "## ", 1), ""]
    if names:
        lines += ["## Images", "", *(f"- `{each}`" for each in names)]
        lines += [f"- from the base `{baseimage.name()}`", ""]
    lines += [f"`sha256sum --check {SUMS}` checks the files.", ""]
    return "\n".join(lines)


def sha256(path: Path) -> str:
    """Return the checksum of a file, which may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(out: Path) -> None:
    """Write the checksum of every file."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(out.iterdir())]
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
        names = archives(made, version) if with_images else []
        (made / "RELEASE_NOTES.md").write_text(notes(version, date, text, lacking, names))
        provenance(root, made, version, lacking, names)
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
    parts = ("wheels", "plugin", "base-image")
    parser.add_argument("part", nargs="?", choices=parts, help="only this")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="(default: dist)")
    parser.add_argument("--draft", action="store_true", help="build what is not ready, too")
    parser.add_argument("--without-images", action="store_true", help="leave out the OCI archives")
    arguments = parser.parse_args(words)
    out: Path = arguments.out
    [(_, base)] = BASE.findall((ROOT / "Dockerfile").read_text())
    if PINNED.search(base):
        os.environ.setdefault("DDPJOB_BASE_IMAGE", base)
    try:
        if arguments.part == "base-image":
            print(pin_base(ROOT))
        elif arguments.part is None:
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
