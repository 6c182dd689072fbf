"""Every manifest of manifests/examples that needs no GPU, as a reader applies it, all at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
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
def own(site: Site) -> Iterator[None]:
    """What `ddpjob init` makes of a script that no image holds."""
    script = ("3_faults.py", "--name", "own-script", "--claim", "1Gi", "--", "--epochs", "2")
    done = subprocess.run(
        [sys.executable, "-m", "ddpjob_tools", "init", "--replicas", "2", *script],
        capture_output=True, text=True, check=True, cwd=ROOT / "examples" / "ladder",
        env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    objects = list(yaml.safe_load_all(done.stdout))
    # Two cores are all that a node of this cluster has, and others run, too.
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    container["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    site.apply(*objects)
    yield
    site.delete("own-script")


def test_none_has_vanished():
    assert set(HERE) == LADDER | {"recipe.yaml", "plain-torchrun.yaml"}


@pytest.mark.tier("all")
@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("file", HERE)
def test_it_runs_to_its_end(site, file):
    body = job(file)
    name = body["metadata"]["name"]
    status = site.wait_phase(name, "Succeeded")
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    assert status["replicas"]["succeeded"] == body["spec"]["replicas"]


@pytest.mark.tier("all")
@pytest.mark.usefixtures("applied")
def test_one_machine_or_several_the_weights_are_the_same(site):
    """Steps 3 and 4 of the ladder: three processes in one pod, or one in each of three."""
    results = []
    for name in ("ladder-3-faults", "ladder-4-machines"):
        site.wait_phase(name, "Succeeded")
        results.append(site.result(name))
    assert results[0] == results[1]
    assert float(results[0]["test_accuracy"]) > 0.95


@pytest.mark.usefixtures("own")
def test_a_script_that_no_image_holds_runs_from_what_init_prints(site):
    status = site.wait_phase("own-script", "Succeeded")
    assert status["replicas"]["succeeded"] == 2
    assert 0 < float(site.result("own-script")["test_accuracy"]) < 1


@pytest.mark.usefixtures("own")
def test_the_weights_can_be_had_when_all_pods_are_done(site, tmp_path):
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
    site.kubectl(*delete, check=True)
