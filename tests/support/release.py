"""What a release is made of, as another checkout."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path

from devcluster.oci import ociarchive
from devcluster.oci.imagestore import BuiltImage, Layer
from support.cluster import ROOT

#: What a release is made of.
SOURCES = (
    "CHANGELOG.md", "Dockerfile", "charts", "contract", "dev/devcluster/src", "dev/release",
    "dev/requirements", "manifests", "operator", "plugin", "tools", "trainer",
)  # fmt: skip
METADATA = "Metadata-Version: 2.1\nName: evil\nVersion: 1\n"


def copy_of_the_sources(target: Path) -> Path:
    """Copy what a release is made of, as another checkout, whose files are newer."""
    for name in SOURCES:
        source, there = ROOT / name, target / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "dist", "*.egg-info")
            shutil.copytree(source, there, ignore=ignored, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, there)
    return target


def source_archive(folder: Path) -> str:
    """Put evil-1 there, as a source archive that leaves a file `ran` when built; return its pin."""
    backend = f"""
import pathlib, zipfile
pathlib.Path({str(folder / "ran")!r}).touch()
def build_wheel(where, *_):
    with zipfile.ZipFile(pathlib.Path(where, "evil-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("evil-1.dist-info/METADATA", {METADATA!r})
        wheel.writestr("evil-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("evil-1.dist-info/RECORD", "")
    return "evil-1-py3-none-any.whl"
"""
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n',
        "PKG-INFO": METADATA,
        "backend.py": backend,
    }
    archive = folder / "evil-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            ociarchive.add(tar, f"evil-1/{name}", text.encode(), 0o644)
    return f"evil==1 --hash=sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}\n"


def image_of(folder: Path, *layers: dict[str, str], config: str = "{}") -> BuiltImage:
    """Return an image whose layers hold these files, the lowest first, below ``folder``."""
    for number, files in enumerate(layers):
        for name, text in files.items():
            (folder / f"{number}/{name}").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}/{name}").write_text(text)
    places = [Layer(f"sha256:{number}", folder / str(number)) for number in range(len(layers))]
    return BuiltImage("{}", config, tuple(places))
