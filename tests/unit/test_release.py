"""What a release refuses, what its notes say, how its plugin ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from devcluster.failure import Failure
from support import release as support
from support.cluster import ROOT
from support.loaded import load

DIGEST = f"@sha256:{'a' * 64}"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load(ROOT / "release/release.py")


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


def test_a_version_that_disagrees_is_named(release: ModuleType, checkout: Path) -> None:
    for path, old in (
        ("charts/ddpjob/Chart.yaml", "\nversion: 0"),
        ("charts/ddpjob/Chart.yaml", 'appVersion: "0'),
        ("Dockerfile", 'image.version="0'),
        ("trainer/pyproject.toml", '\nversion = "0'),
        ("operator/src/ddpjob_operator/__init__.py", '__version__ = "0'),
        ("devcluster/src/devcluster/images.py", 'VERSION = "0'),
        ("CHANGELOG.md", "## 0"),
    ):
        text = (checkout / path).read_text()
        (checkout / path).write_text(text.replace(old, f"{old[:-1]}7", 1))
        with pytest.raises(Failure, match=rf"versions disagree: .*{path} \S*.*7\.1\.0"):
            release.release(checkout, checkout / "out", draft=True, with_images=False)
        (checkout / path).write_text(text)


def test_what_is_not_ready_is_refused_with_the_cure(
    release: ModuleType,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refusal() -> str:
        with pytest.raises(Failure) as caught:
            release.release(checkout, tmp_path / "out", draft=False, with_images=True)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert len(release.versions()) == 10
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
    assert "python:3.11-slim has no digest: set DDPJOB_BASE_IMAGE=NAME@sha256" in refusal()
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


def test_notes_are_the_changelogs_section(release: ModuleType, checkout: Path) -> None:
    older = "\n## 0.0.9 - 2026-01-01\n\n### Added\n- Something old.\n"
    with (checkout / "CHANGELOG.md").open("a") as file:
        file.write(older)
    version, date, text = release.newest_section(checkout)
    assert (version, date) == ("0.1.0", "2026-12-01")
    notes = release.notes(version, date, text, [], [f"docker.io/ddpjob/operator:0.1.0{DIGEST}"])
    assert notes.startswith("# ddpjob 0.1.0 (2026-12-01)\n")
    assert "Something old" not in notes
    assert "\n## Added\n" in notes
    assert f"- from the base `docker.io/library/python:3.11-slim{DIGEST}`" in notes
    assert "Draft" not in notes
    assert "- no day" in release.notes(version, date, text, ["no day"], [])
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    with pytest.raises(Failure, match=r"no section `## X\.Y\.Z - DATE`"):
        release.newest_section(checkout)


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
    release: ModuleType, tmp_path: Path, words: list[str], answer: str, code: int
) -> None:
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
