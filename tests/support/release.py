"""What a release is made of, as another checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.cluster import ROOT

#: What a release is made of.
SOURCES = (
    "CHANGELOG.md", "Dockerfile", "charts", "contract", "devcluster/src", "manifests", "operator",
    "plugin", "release", "requirements", "tools", "trainer",
)  # fmt: skip


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
