"""The wheel in an image that is not ours: another Python, another torch, neither built by PyPI.

Debian's testing release has both as packages. Minutes and gigabytes, and another machine's work
whenever that release moves: `make foreign-image` and `make test-all`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml

from support import own_images
from support.cluster import ROOT, wait_for
from support.launching import PATHS
from support.own_images import blocks
from support.patience import WHOLE
from support.site import Site

pytestmark = pytest.mark.tier("all")

IMAGE = "registry.example/theirs:ddpjob"
SUITE = "forky"
PACKAGES = ("python3", "python3-pip", "python3-torch", "python3-sklearn")
DIGITS = ROOT / "examples" / "digits.py"
#: What the image's torch is, seen by the user's own Python.
VERSIONS = """
import sys, torch, numpy
print("python", ".".join(map(str, sys.version_info[:2])))
print("torch", torch.__version__, torch.__file__)
print("numpy", numpy.__file__)
from ddpjob_trainer.data.generators import is_library
print("installed", is_library(torch.__file__))
"""


@pytest.fixture(scope="module")
def image(site: Site, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's third Dockerfile from Debian's Python and torch, on all nodes."""
    home = tmp_path_factory.mktemp("foreign")
    context = home / "context"
    release = [sys.executable, ROOT / "release/release.py", "wheels", "--out", context]
    subprocess.run(release, check=True)
    _, file, _ = blocks("An image that you have already: add the wheel")
    file = file.replace("YOUR/image:TAG", own_images.debian(SUITE, *PACKAGES))
    # As the page says of what a distribution has installed: here sympy asks for another mpmath.
    wheel = next(context.glob("ddpjob_trainer-*.whl")).name
    plain = f"pip install --no-cache-dir /tmp/{wheel}"
    assert plain in file
    cure = plain.replace("install", "install --break-system-packages --no-deps")
    file = file.replace(plain, f"{cure} prometheus-client safetensors")
    with own_images.built("foreign", file, context, own_images.from_index(home / "pip")) as name:
        own_images.into_nodes(site.cluster.name, IMAGE, name)
    return IMAGE


def job(image: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    """What `init` prints for the digits example in that image; four ranks in two pods."""
    words = ["init", DIGITS.name, "--name", name, "--image", image, "--replicas", "2"]
    words += ["--nproc", "2", "--snapshots", "snapshots", "--every-steps", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "ddpjob_trainer", *words, "--", *arguments], cwd=DIGITS.parent,
        env={"PYTHONPATH": PATHS}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    objects = list(yaml.safe_load_all(done.stdout))
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    container["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    return objects


def said(site: Site, image: str, name: str, command: list[str]) -> str:
    """The log of a pod that runs a command of the image to its end, beside digits.py."""
    files, _ = job(image, name)
    pod = yaml.safe_load(blocks("The weights")[0])
    pod["metadata"]["name"] = name
    pod["spec"]["volumes"] = [{"name": "files", "configMap": {"name": files["metadata"]["name"]}}]
    (container,) = pod["spec"]["containers"]
    container |= {"image": image, "command": command}
    container["volumeMounts"] = [{"name": "files", "mountPath": "/workspace/job"}]
    site.apply(files, pod)

    def ended() -> str | None:
        phase = site.get("pod", name)["status"].get("phase")
        return phase if phase in ("Succeeded", "Failed") else None

    phase = wait_for(ended, f"pod {name} to end", WHOLE)
    log = site.kubectl("logs", name, check=True).stdout
    assert phase == "Succeeded", log
    site.kubectl("delete", "pod", name, "--grace-period=1", check=True)
    return log


def test_pip_keeps_the_torch_of_the_image(site: Site, image: str) -> None:
    log = said(site, image, "versions", ["python3", "-c", VERSIONS])
    print(log)
    found = dict(line.split(" ", 1) for line in log.splitlines())
    assert found["python"] != "3.11"
    assert found["torch"].endswith("/usr/lib/python3/dist-packages/torch/__init__.py")
    assert found["numpy"].startswith("/usr/lib/python3/")
    assert found["installed"] == "True"


def test_kills_leave_no_trace_in_it(site: Site, image: str) -> None:
    chaos = ["ddpjob-trainer", "chaos", "--nproc", "3", "--kills", "6"]
    log = said(site, image, "chaos", [*chaos, f"/workspace/job/{DIGITS.name}"])
    print(log)
    assert "identical" in log.lower()


def test_a_gang_in_it_comes_back_and_ends_in_the_same_weights(site: Site, image: str) -> None:
    site.apply(*job(image, "undisturbed", "--total-steps", "60"))
    site.wait_phase("undisturbed", "Succeeded")
    expected = site.result("undisturbed")
    site.apply(*job(image, "disturbed", "--total-steps", "60", "--step-seconds", "1"))
    status = site.wait_running("disturbed", 1, snapshot_after=0)
    site.kill_training("disturbed-1")
    wait_for(lambda: site.status("disturbed")["restarts"].get("inPlace"), "a restart in place")
    site.wait_running("disturbed", 1, snapshot_after=status["progress"]["snapshotStep"])
    site.kubectl("delete", "pod", "disturbed-0", "--wait=false", check=True)
    status = site.wait_phase("disturbed", "Succeeded")
    assert (status["attempt"], status["restarts"]["total"]) == (2, 1)
    assert site.result("disturbed") == expected
    for name in ("undisturbed", "disturbed"):
        site.delete(name)
