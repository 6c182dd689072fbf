"""The benchmarks of scaling and of the pictures run, at their shortest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import benches
from support.loaded import load

pytestmark = pytest.mark.tier("all")


def test_scaling(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    found = benches.quick("scaling", tmp_path, "--page", str(page))
    [modes] = found["steps"].values()
    for mode, share in (("weak", 1), ("strong", 2)):
        one, two = (modes[mode][world]["phases"] for world in ("1", "2"))
        assert one["samples"] == share * two["samples"], mode
        assert min(two[phase] for phase in ("forward", "backward", "exposed", "optimizer")) > 0
    [said] = found["model"].values()
    assert set(said["weak"]) == {"1", "2", "8"}
    assert "8 †" in page.read_text()


def test_pictures(tmp_path: Path) -> None:
    benches.quick("pictures", tmp_path, "--into", str(tmp_path))
    pictures = load(benches.ROOT / "docs/pictures.py")
    ring = json.loads((tmp_path / "ring.json").read_text())
    assert ring["equal to torch's all_reduce"]
    assert all(len(of) == ring["ranks"] for of in pictures.states(ring)[-1].values())
    step = json.loads((tmp_path / "buckets.json").read_text())
    assert len(step["buckets"]) > 1
    assert step["gradients"][0]["name"] == "head.bias"  # the last layer's come first
    assert pictures.buckets(step).startswith("<svg")
