"""A release without its images: whole, usable, and the same bytes from another checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from support import release as support
from support.chart import Helm
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


def test_is_whole_and_the_chart_is_the_chart(made: Path, helm: Helm) -> None:
    version = made.name.removeprefix("ddpjob-")
    assert {path.name for path in made.iterdir()} == {
        f"ddpjob-{version}.tgz",
        f"ddpjob_operator-{version}-py3-none-any.whl",
        f"ddpjob_trainer-{version}-py3-none-any.whl",
        "RELEASE_NOTES.md", "SHA256SUMS", "crd.yaml", "install.yaml", "kubectl-ddp",
        "operator.cdx.json", "provenance.json", "trainer.cdx.json",
    }  # fmt: skip
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made, check=True)
    assert len((made / "SHA256SUMS").read_text().splitlines()) == 10
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
def test_bills_name_every_pin_with_its_hashes(made: Path, image: str, locks: list[str]) -> None:
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
def test_another_checkout_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    copy = support.copy_of_the_sources(tmp_path / "elsewhere")
    again = build(copy, tmp_path / "out")
    for path in made.iterdir():
        # A draft says which checkout it was made of.
        if path.name in ("RELEASE_NOTES.md", "provenance.json", "SHA256SUMS"):
            continue
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_the_trainers_wheel_is_all_that_an_image_of_the_users_needs(
    made: Path, tmp_path: Path
) -> None:
    """The third way of docs/start/your-script.md: nothing of this checkout is on the path."""
    [wheel] = made.glob("ddpjob_trainer-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    [found] = distributions(path=[str(site)])
    assert found.metadata["Requires-Python"] == ">=3.11"
    page = (ROOT / "docs/start/your-script.md").read_text()
    assert f"{wheel.name} /tmp/" in page
    for needed in found.requires or []:
        name = re.split(r"[ ;<>=\[]", needed, maxsplit=1)[0]
        assert "extra ==" in needed or name.lower() in page.lower(), f"{name} is not told of"
    [command] = found.entry_points.select(group="console_scripts", name="ddpjob-trainer")
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    start = f"import sys, {command.module} as m; sys.exit(m.{command.attr}())"
    env, output = {**os.environ, "PYTHONPATH": str(site)}, ""
    for words in (["init", "train.py"], ["local", "-"]):
        done = subprocess.run(
            [sys.executable, "-c", start, *words], input=output, cwd=tmp_path,
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        output = done.stdout
    assert sorted(output.splitlines()) == ["[train-0] rank 0", "[train-1] rank 1"]
