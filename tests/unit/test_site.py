"""The documentation's site is built: no link of it is broken, and its search is on the disk."""

import json
import subprocess
from pathlib import Path

import pytest

from devcluster import host, venv
from support.cluster import ROOT

pytestmark = pytest.mark.tier("all")


def test_it_is_built_and_its_search_needs_no_network(tmp_path: Path) -> None:
    try:
        home = venv.ensure_environment(ROOT / "dev/requirements", print, ("site",))
    except (host.Failure, OSError) as error:
        pytest.skip(f"no mkdocs: {error}")
    built = [str(home / "bin/mkdocs"), "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    assert any("goodput" in one["text"] for one in index["docs"])
