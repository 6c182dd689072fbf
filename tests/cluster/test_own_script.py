"""docs/start/your-script.md: a script on a claim.

Blocks of the page are run as a reader runs them, by a shell; of the names in capitals those that
only the reader can know are filled in. The ConfigMap is test_examples.py's, git test_pages.py's.
"""

from __future__ import annotations

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
def here(site: Site, tmp_path: Path) -> Path:
    """A folder with the code, where `kubectl` and `ddpjob-trainer` are those of the tests."""
    write(tmp_path / "code", CODE)
    kubectl = [site.cluster.kubectl_path, "--kubeconfig", site.cluster.kubeconfig]
    commands = {
        "kubectl": " ".join(map(str, [*kubectl, "-n", site.namespace])),
        "ddpjob-trainer": f"env PYTHONPATH={PATHS} {sys.executable} -m ddpjob_trainer",
    }
    (tmp_path / "bin").mkdir()
    for name, command in commands.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "code"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def run(here: Path, commands: str) -> str:
    """What a reader who pastes a block sees; fails where one of its lines fails."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=here, text=True, check=False,
        env={**os.environ, "PATH": f"{here.parent / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def logs(site: Site, job: str, replicas: int = 2) -> list[str]:
    names = (f"{job}-{replica}" for replica in range(replicas))
    return [site.kubectl("logs", name, check=True).stdout for name in names]


@pytest.fixture
def claim(site: Site, here: Path) -> Iterator[None]:
    """Files of the page that commands of more than one section name, and what they leave."""
    (here / "claim.yaml").write_text(blocks("More files: a claim")[0])
    (here / "weights.yaml").write_text(blocks("The weights")[0])
    yield
    site.kubectl("delete", "pod", "weights", "--grace-period=1", "--ignore-not-found", check=True)
    site.kubectl("delete", "pvc", "train-snapshots", "--ignore-not-found", check=True)


@pytest.mark.usefixtures("claim")
def test_more_files_than_a_config_map_holds_lie_on_a_claim(site: Site, here: Path) -> None:
    _, commands = blocks("More files: a claim")
    shown = run(here, commands)
    try:
        site.wait_phase("train", "Succeeded")
        for rank, log in enumerate(logs(site, "train")):
            assert f"rank {rank} has a net in /snapshots/code-1, beside /snapshots/code-1" in log
            assert f"[train-{rank}] rank {rank} has a net in {here}, beside {here}" in shown
    finally:
        site.delete("train")
