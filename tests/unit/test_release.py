"""What a release refuses, what its notes say, how its plugin ends."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from devcluster import Failure
from support import release as support
from support.cluster import ROOT
from support.loaded import load

DIGEST = f"@sha256:{'a' * 64}"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load(ROOT / "dev/release/release.py")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = support.copy_of_the_sources(tmp_path_factory.mktemp("copied") / "checkout")
    text = (root / "CHANGELOG.md").read_text()
    (root / "CHANGELOG.md").write_text(text.replace("- unreleased", "- 2026-12-01", 1))
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")
    return root


@pytest.fixture
def checkout(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DDPJOB_BASE_IMAGE", f"docker.io/library/python:3.11-slim{DIGEST}")
    yield copied
    git(copied, "checkout", "--quiet", "--", ".")


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def test_a_version_that_disagrees_is_named(release, checkout):
    for path, old in (
        ("charts/ddpjob/Chart.yaml", "\nversion: 0"),
        ("charts/ddpjob/Chart.yaml", 'appVersion: "0'),
        ("Dockerfile", 'image.version="0'),
        ("trainer/pyproject.toml", '\nversion = "0'),
        *((f"{one}/pyproject.toml", "contract==0") for one in ("operator", "trainer", "plugin")),
        ("operator/src/ddpjob_operator/__init__.py", '__version__ = "0'),
        ("dev/devcluster/src/devcluster/oci/images.py", 'VERSION = "0'),
        ("CHANGELOG.md", "## 0"),
    ):
        text = (checkout / path).read_text()
        (checkout / path).write_text(text.replace(old, f"{old[:-1]}7", 1))
        with pytest.raises(Failure, match=rf"versions disagree: .*{path} \S*.*7\.2\.0"):
            release.release(checkout, checkout / "out", draft=True, with_images=False)
        (checkout / path).write_text(text)


def test_what_is_not_ready_is_refused_with_the_cure(
    release, checkout, tmp_path, monkeypatch, capsys
):
    def refusal() -> str:
        with pytest.raises(Failure) as caught:
            release.release(checkout, tmp_path / "out", draft=False, with_images=True)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert len(release.versions()) == 15
    assert release.not_ready(checkout, "2026-12-01", with_images=True) == []
    (checkout / "new.txt").write_text("")
    assert "not committed (new.txt): commit them (or make a draft" in refusal()
    (checkout / "new.txt").unlink()

    (checkout / ".git/info").mkdir(exist_ok=True)
    (checkout / ".git/info/exclude").write_text("*.log\n")
    (checkout / "charts/ddpjob/x.log").write_text("")
    assert "git ignores are in the chart (charts/ddpjob/x.log): remove them" in refusal()
    (checkout / "charts/ddpjob/x.log").unlink()

    monkeypatch.setenv("DDPJOB_BASE_IMAGE", "python:3.11-slim")
    assert "python:3.11-slim has no digest: run `make base-image` and commit" in refusal()
    monkeypatch.setenv("DDPJOB_BASE_IMAGE", "python@sha256:latest")
    [lacking] = release.not_ready(checkout, "2026-12-01", with_images=True)
    assert lacking.startswith("the base image python@sha256:latest has no digest")
    monkeypatch.delenv("DDPJOB_BASE_IMAGE")
    assert "localhost/ddpjob/base" in refusal()
    assert release.not_ready(checkout, "2026-12-01", with_images=False) == []

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    assert release.main(["plugin", "--out", str(tmp_path)]) == 1
    assert "SOURCE_DATE_EPOCH is 'yesterday'" in capsys.readouterr().err

    [lacking] = release.not_ready(tmp_path, "2026-12-01", with_images=False)
    assert lacking == "this is no git checkout: release from a clone"
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("- 2026-12-01", "- unreleased", 1))
    assert "dates the version 'unreleased': write the day" in refusal()


@pytest.mark.parametrize(
    ("words", "answer", "code"),
    [
        (["status"], "echo '{\"items\": []}'", 0),
        (["status"], "echo refused >&2; exit 1", 1),
        (["status"], "kill -TERM $PPID; exec sleep 300", 143),
        (["--version"], "", 0),
        (["status", "--nope"], "", 2),
        ([], "", 2),
    ],
)
def test_the_file_that_users_get_ends_with_the_codes_of_its_docs(
    release, tmp_path, words, answer, code
):
    release.plugin(ROOT, tmp_path, 1)
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "kubectl").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [tmp_path / "kubectl-ddp", *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    if "--version" in words:
        assert done.stdout.split()[-1] == release.one_version(release.versions())
