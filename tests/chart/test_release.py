"""A release without its images: whole, usable, and the same bytes from another checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from devcluster import venv
from support import release as support
from support.cluster import ROOT

pytestmark = pytest.mark.tier("gate")  # it builds everything twice


def build(root: Path, out: Path) -> Path:
    """Make a draft out of the checkout at ``root``."""
    command = [sys.executable, root / "dev/release/release.py", "--draft", "--without-images"]
    source = {"PYTHONPATH": str(ROOT / "dev/devcluster/src"), "SOURCE_DATE_EPOCH": "1790000000"}
    done = subprocess.run(
        [*command, "--out", out], env={**os.environ, **source},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("release"))


def test_is_whole_and_the_chart_is_the_chart(made, helm):
    version = made.name.removeprefix("ddpjob-")
    assert {path.name for path in made.iterdir()} == {
        f"ddpjob-{version}.tgz",
        f"ddpjob_contract-{version}-py3-none-any.whl",
        f"ddpjob_operator-{version}-py3-none-any.whl",
        f"ddpjob_trainer-{version}-py3-none-any.whl",
        f"kubectl_ddp-{version}-py3-none-any.whl",
        "RELEASE_NOTES.md", "SHA256SUMS", "crd.yaml", "install.yaml", "kubectl-ddp",
        "operator.cdx.json", "provenance.json", "trainer.cdx.json",
    }  # fmt: skip
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made, check=True)
    assert len((made / "SHA256SUMS").read_text().splitlines()) == 12
    chart = made / f"ddpjob-{version}.tgz"
    shown = [
        helm("template", "ddpjob", str(where), "--include-crds").stdout
        for where in (chart, ROOT / "charts/ddpjob")
    ]
    assert shown[0]
    assert shown[0] == shown[1]
    names = [name for wheel in made.glob("*.whl") for name in zipfile.ZipFile(wheel).namelist()]
    with tarfile.open(chart) as archive:
        names += archive.getnames()
    assert len(names) > 100
    assert [name for name in names if "__pycache__" in name] == []


@pytest.mark.parametrize(
    ("image", "locks"), [("operator", ["operator"]), ("trainer", ["torch", "trainer"])]
)
def test_bills_name_every_pin_with_its_hashes(made, image, locks):
    text = "".join((ROOT / f"dev/requirements/{lock}.txt").read_text() for lock in locks)
    bill = json.loads((made / f"{image}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == f"ddpjob-{image}"
    named = {(each["name"], each["version"]) for each in bill["components"]}
    assert named == set(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    hashes = {
        one["content"]
        for each in bill["components"]
        for place in each["externalReferences"]
        for one in place["hashes"]
    }
    assert hashes == set(re.findall(r"--hash=sha256:(\w+)", text))


@pytest.mark.tier("all")
def test_another_checkout_gives_the_same_bytes(made, tmp_path):
    copy = support.copy_of_the_sources(tmp_path / "elsewhere")
    again = build(copy, tmp_path / "out")
    for path in made.iterdir():
        # A draft says which checkout it was made of.
        if path.name in ("RELEASE_NOTES.md", "provenance.json", "SHA256SUMS"):
            continue
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_wheels_share_no_file_and_an_image_needs_two_of_them(made, tmp_path):
    """The last way of docs/start/your-script.md: nothing of this checkout is on the path."""
    tool, home = venv.ensure_uv(ROOT / "dev/requirements", print), tmp_path / "home"
    env = {**venv.uv_variables(tool), "UV_PYTHON": str(home / "bin/python")}
    env["PYTHONPATH"] = sysconfig.get_path("purelib")  # the packages of others

    def run(*words: object, given: str = "") -> str:
        done = subprocess.run(
            [*map(str, words)], input=given, cwd=tmp_path, env=env,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pip(*words: object) -> dict[str, Distribution]:
        run(tool / "bin/uv", "pip", *words, "--offline")
        [site] = home.glob("lib/python3*/site-packages")
        return {each.name: each for each in distributions(path=[str(site)])}

    run(tool / "bin/uv", "venv", "--offline", "--python", sys.executable, home)
    found = pip("install", "--no-index", "--find-links", made, "kubectl-ddp")
    assert found.keys() == {"ddpjob-contract", "kubectl-ddp"}
    found = pip("install", "--no-deps", *made.glob("*.whl"))
    assert len(found) == 4
    owners = Counter(str(file) for each in found.values() for file in each.files or [])
    assert [file for file, number in owners.items() if number > 1] == []
    page = (ROOT / "docs/start/your-script.md").read_text()
    for wheel in made.glob("ddpjob_[ct]*.whl"):
        assert f"COPY {wheel.name} /tmp/" in page
    assert found["ddpjob-trainer"].metadata["Requires-Python"] == ">=3.11"
    for needed in found["ddpjob-trainer"].requires or []:
        name = re.split(r"[ ;<>=\[]", needed, maxsplit=1)[0].replace("ddpjob-", "ddpjob_")
        assert "extra ==" in needed or name.lower() in page.lower(), f"{name} is not told of"
    for program in ("ddpjob-operator", "kubectl-ddp"):
        run(home / "bin" / program, "--help")
    pip("uninstall", "ddpjob-operator")
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    ddpjob = home / "bin/ddpjob"
    output = run(ddpjob, "local", "-", given=run(ddpjob, "init", "train.py"))
    assert sorted(output.splitlines()) == ["[train-0] rank 0", "[train-1] rank 1"]
