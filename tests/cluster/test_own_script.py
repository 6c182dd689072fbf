"""docs/start/your-script.md: a script on a claim, its blocks run as a reader runs them, by a shell.

The ConfigMap is test_examples.py's, git test_pages.py's.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import PATHS
from support.manifest import blocks
from support.site import Site

#: A script and what it imports; no torch, whose start would be all that the test lasts.
CODE = {
    "train.py": """
import os, pathlib
from models.net import NAME
rank = os.environ["RANK"]
pathlib.Path(f"written-by-{rank}").write_text(NAME)
print(f"rank {rank} has {NAME} in {pathlib.Path.cwd()}, beside {pathlib.Path(__file__).parent}")
""",
    "models/net.py": "NAME = 'a net'\n",
}


@pytest.fixture
def here(site: Site, tmp_path: Path) -> Iterator[Path]:
    """A folder with the code, where `kubectl` and `ddpjob` are those of the tests."""
    kubectl = [site.cluster.kubectl_path, "--kubeconfig", site.cluster.kubeconfig]
    commands = {
        "kubectl": " ".join(map(str, [*kubectl, "-n", site.namespace])),
        "ddpjob": f"env PYTHONPATH={PATHS} {sys.executable} -m ddpjob_tools",
    }
    files = {f"../bin/{n}": f'#!/bin/sh\nexec {line} "$@"\n' for n, line in commands.items()}
    # Files of the page that commands of more than one section name.
    files["claim.yaml"] = blocks("More files: a claim")[0]
    files["weights.yaml"] = blocks("The weights")[0]
    for name, content in {**CODE, **files}.items():
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    yield tmp_path / "code"
    for what in ("ddpjob/train", "pod/weights", "pvc/train-snapshots"):
        site.kubectl("delete", what, "--ignore-not-found", "--grace-period=1", check=True)


def test_more_files_than_a_config_map_holds_lie_on_a_claim(site, here):
    _, commands = blocks("More files: a claim")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=here, text=True, check=False,
        env={**os.environ, "PATH": f"{here.parent / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    site.wait_phase("train", "Succeeded")
    for rank in (0, 1):
        log = site.kubectl("logs", f"train-{rank}", check=True).stdout
        assert f"rank {rank} has a net in /snapshots/code-1, beside /snapshots/code-1" in log
        assert f"[train-{rank}] rank {rank} has a net in {here}, beside {here}" in done.stdout
