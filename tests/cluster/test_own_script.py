"""docs/start/your-script.md: a script on a claim, its blocks run as a reader runs them, by a shell.

The ConfigMap is test_examples.py's, git test_pages.py's.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import wait_for
from support.launching import PATHS
from support.manifest import blocks
from support.plugin import wheel
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


#: Of a kind with those that need no file but themselves; each rank leaves one.
ALONE = """
import os, pathlib
rank = os.environ["RANK"]
pathlib.Path(f"out/rank-{rank}").write_text("weights")
print(f"rank {rank} is done", flush=True)
"""


def test_from_a_script_to_its_log_and_its_results_in_two_commands(site, here):
    (here / "alone.py").write_text(ALONE)
    name, lines = ended(here, "alone.py", "--output", "out", *SMALL)
    assert {f"[pod/{name}-{rank}/trainer] rank {rank} is done" for rank in (0, 1)} <= lines
    home = ddpjob(here, "cp", name, "results", "--yes")
    assert home.returncode == 0, home.stderr
    assert sorted(one.name for one in (here / "results").iterdir()) == ["rank-0", "rank-1"]
    made = site.get("pods", "-l", "app.kubernetes.io/name=ddpjob-evidence")["items"]
    assert all("deletionTimestamp" in one["metadata"] for one in made)
    site.kubectl("get", "configmap", f"{name}-files", check=True)
    site.delete(name)
    wait_for(
        lambda: not site.kubectl("get", "configmap", f"{name}-files", "--ignore-not-found").stdout,
        "the files to go with their job",
    )


SMALL = ("--cpu", "100m", "--memory", "64Mi", "--snapshots", "train-snapshots", "--claim", "1Gi")


@pytest.mark.tier("all")
def test_more_files_come_with_the_same_command_by_the_claim(site, here):
    (here / "data").mkdir()
    (here / "data/large.bin").write_bytes(bytes(3 * 10**6))
    (here / "alone.py").write_text("import os; print(os.path.getsize('data/large.bin'))\n")
    name, lines = ended(here, "alone.py", "data", *SMALL)
    assert {f"[pod/{name}-{rank}/trainer] 3000000" for rank in (0, 1)} <= lines
    site.delete(name)


@pytest.mark.tier("all")
def test_packages_come_at_the_start_though_the_image_has_no_pip(site, here):
    (here / "needs.txt").write_text(wheel(here, "seven", "Requires-Dist: numpy\n"))
    (here / "alone.py").write_text("import seven; print(seven.x)\n")
    files = ("alone.py", "seven-1-py3-none-any.whl", "--pip", "needs.txt")
    name, lines = ended(here, *files, "--env", "PIP_NO_INDEX=1", *SMALL)
    assert {f"[pod/{name}-{rank}/trainer] 7" for rank in (0, 1)} <= lines
    site.delete(name)


def ended(here: Path, *words: str) -> tuple[str, set[str]]:
    """Run a script; its job's name, and the lines of its pods."""
    done = ddpjob(here, "run", *words)
    assert done.returncode == 0, done.stderr
    [name] = re.findall(r"^(alone-\w{5}): created in", done.stderr, re.MULTILINE)
    assert f"{name}: Succeeded, after" in done.stderr
    return name, set(done.stdout.splitlines())


def ddpjob(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As a user without a terminal calls it."""
    return subprocess.run(
        ["ddpjob", *words], cwd=here, text=True, check=False, capture_output=True,
        env={**os.environ, "PATH": f"{here.parent / 'bin'}:{os.environ['PATH']}"},
    )  # fmt: skip
