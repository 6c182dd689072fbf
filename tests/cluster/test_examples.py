"""Every manifest of manifests/examples that needs no GPU, as a reader applies it, all at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from support.cluster import ROOT
from support.launching import PATHS
from support.manifest import blocks, example, examples
from support.site import Site

#: Files that others run (nearly all of them as digits()), or that ask for an object store.
ELSEWHERE = {"digits.yaml", "gpu-check.yaml", "no-shared-storage.yaml"}
LADDER = {
    f"ladder/{name}.yaml" for name in ("1-single", "2-processes", "3-faults", "4-machines", "5-gpt")
}
HERE = sorted(set(examples()) - ELSEWHERE)
#: To the commands, where the whole would take minutes.
SHORTER = {"ladder/5-gpt.yaml": ["--total-steps", "60", "--sample", "60"]}


def job(file: str) -> dict[str, Any]:
    (found,) = (body for body in example(file) if body["kind"] == "DDPJob")
    return found


#: A package with a folder that has a space, a file of bytes, and an import of a sibling.
PACKAGE = {
    "own/__init__.py": b"",
    "own/train.py": b"""
import os, pathlib
from . import sibling
data = pathlib.Path(__file__).with_name("data files").joinpath("\xc3\xa4.bin").read_bytes()
rank = os.environ["RANK"]
pathlib.Path("lost").write_text(rank)
pathlib.Path("kept", f"rank-{rank}").write_text(rank)
print(f"rank {rank} has {sibling.NAME} and {len(data)} bytes")
""",
    "own/sibling.py": b"NAME = 'a sibling'\n",
    "own/data files/\u00e4.bin": b"\xff\x00\xfe",
}


def initialised(here: Path, *words: str) -> list[dict[str, Any]]:
    """What `ddpjob-trainer init` makes of a script that no image holds."""
    done = subprocess.run(
        [sys.executable, "-m", "ddpjob_trainer", "init", "--replicas", "2", *words],
        capture_output=True, text=True, check=True, cwd=here,
        env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    objects = list(yaml.safe_load_all(done.stdout))
    # Two cores are all that a node of this cluster has, and others run, too.
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    container["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    return objects


@pytest.fixture(scope="module")
def applied(site: Site) -> Iterator[None]:
    for file in HERE:
        objects = example(file)
        for body in objects:
            if body["kind"] == "DDPJob":
                (container,) = body["spec"]["template"]["spec"]["containers"]
                container["command"] += SHORTER.get(file, [])
        site.apply(*objects)
    yield
    for file in HERE:
        site.delete(job(file)["metadata"]["name"])


@pytest.fixture(scope="module")
def own(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    script = ("3_faults.py", "--name", "own-script", "--claim", "1Gi", "--", "--epochs", "2")
    site.apply(*initialised(ROOT / "examples" / "ladder", *script))
    here = tmp_path_factory.mktemp("package")
    for name, content in PACKAGE.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    words = ("-m", "own.train", "--snapshots", "own-script-snapshots", "--output", "kept")
    site.apply(*initialised(here, *words))
    yield
    for name in ("own-script", "own-train"):
        site.delete(name)


def test_none_has_vanished() -> None:
    assert set(HERE) == LADDER | {"recipe.yaml", "plain-torchrun.yaml"}


@pytest.mark.tier("all")
@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("file", HERE)
def test_it_runs_to_its_end(site: Site, file: str) -> None:
    body = job(file)
    name = body["metadata"]["name"]
    status = site.wait_phase(name, "Succeeded")
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    assert status["replicas"]["succeeded"] == body["spec"]["replicas"]


@pytest.mark.tier("all")
@pytest.mark.usefixtures("applied")
def test_one_machine_or_several_the_weights_are_the_same(site: Site) -> None:
    """Steps 3 and 4 of the ladder: three processes in one pod, or one in each of three."""
    results = []
    for name in ("ladder-3-faults", "ladder-4-machines"):
        site.wait_phase(name, "Succeeded")
        results.append(site.result(name))
    assert results[0] == results[1]
    assert float(results[0]["test_accuracy"]) > 0.95


@pytest.mark.tier("all")
@pytest.mark.usefixtures("applied")
def test_the_gpt_has_written_something(site: Site) -> None:
    site.wait_phase("ladder-5-gpt", "Succeeded")
    log = site.kubectl("logs", "ladder-5-gpt-0", check=True).stdout
    assert "\ndef " in log
    assert 0 < float(site.result("ladder-5-gpt")["loss"]) < 3.4


@pytest.mark.usefixtures("own")
def test_a_script_that_no_image_holds_runs_from_what_init_prints(site: Site) -> None:
    status = site.wait_phase("own-script", "Succeeded")
    assert status["replicas"]["succeeded"] == 2
    assert 0 < float(site.result("own-script")["test_accuracy"]) < 1


@pytest.mark.usefixtures("own")
def test_a_package_runs_with_its_folders_and_files(site: Site) -> None:
    site.wait_phase("own-train", "Succeeded")
    for rank in (0, 1):
        log = site.kubectl("logs", f"own-train-{rank}", check=True).stdout
        assert f"rank {rank} has a sibling and 3 bytes" in log


@pytest.mark.usefixtures("own")
def test_the_weights_can_be_had_when_all_pods_are_done(site: Site, tmp_path: Path) -> None:
    """As docs/start/your-script.md says."""
    site.wait_phase("own-script", "Succeeded")
    shown, commands = blocks("The weights")
    (pod,) = yaml.safe_load_all(shown.replace("train-snapshots", "own-script-snapshots"))
    site.apply(pod)
    lines = commands.replace("/snapshots/train", "/snapshots/own-script").strip().splitlines()
    wait, ls, export, copy, delete = (line.split()[1:] for line in lines[1:])
    for words in (wait, ls, export):
        site.kubectl(*words, check=True)
    there = tmp_path / "model.safetensors"
    site.kubectl(*copy[:-1], str(there), check=True)
    assert load_file(there), "no weights"
    site.wait_phase("own-train", "Succeeded")
    kept = site.kubectl("exec", "weights", "--", "ls", "/snapshots/own-train/output", check=True)
    assert kept.stdout.split() == ["rank-0", "rank-1"], "what --output keeps"
    site.kubectl(*delete, check=True)
