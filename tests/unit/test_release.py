"""What a release refuses, what its notes say, how its plugin ends."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from devcluster import Failure, binaries
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
        with pytest.raises(Failure, match=rf"versions disagree: .*{path} \S*.*7\.1\.0"):
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


def test_notes_are_the_changelogs_section(release, checkout):
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


def test_a_wheel_is_built_with_wheels_alone(release, tmp_path, monkeypatch):
    (tmp_path / "dev/requirements").mkdir(parents=True)
    (tmp_path / "dev/requirements/uv.txt").symlink_to(ROOT / "dev/requirements/uv.txt")
    (tmp_path / "dev/requirements/build.txt").write_text(support.source_archive(tmp_path))
    (tmp_path / "contract").mkdir()
    (tmp_path / "contract/pyproject.toml").write_text(
        '[build-system]\nrequires = ["evil"]\nbuild-backend = "evil"\n'
        '[project]\nname = "x"\nversion = "1"\n'
    )
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    with pytest.raises(Failure, match="building from source is disabled"):
        release.wheels(tmp_path, tmp_path / "out", 1790000000)
    assert not (tmp_path / "ran").exists()


STATUS = """\
Package: libstdc++6
Status: install ok installed
Architecture: amd64
Source: gcc-12 (12.2.0-13)
Version: 12.2.0-14+deb12u1
Description: a library
 Package: forged
 Status: install ok installed

Package: login
Status: hold ok installed
Architecture: amd64
Source: shadow
Version: 1:4.13+dfsg1-1

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1
"""


def test_the_bill_of_an_image_names_what_its_base_gave(release, tmp_path):
    image = support.image_of(
        tmp_path,
        {"usr/lib/os-release": 'NAME="Debian"\nID=debian\nVERSION_ID="12"\n',
         "var/lib/dpkg/status": "Package: hidden\nStatus: install ok installed\n",
         "usr/local/lib/python3.11/site-packages/Foo_bar-1.0.dist-info/METADATA": ""},
        {"var/lib/dpkg/status": STATUS},
        {"opt/ddpjob/bin/python": ""},
        config='{"config": {"Env": ["A=1", "PYTHON_VERSION=3.11.14"]}}',
    )  # fmt: skip
    system, *packages = release.base_packages(image)
    assert system == {"type": "operating-system", "name": "debian", "version": "12"}
    library = "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12"
    assert [each["purl"] for each in packages] == [
        f"{library}&upstream=gcc-12%4012.2.0-13",
        "pkg:deb/debian/login@1:4.13%2Bdfsg1-1?arch=amd64&distro=debian-12&upstream=shadow",
        "pkg:generic/python@3.11.14",
        "pkg:pypi/foo-bar@1.0",
    ]
    assert packages[0]["name"] == "libstdc++6"
    assert packages[1]["version"] == "1:4.13+dfsg1-1"


def test_a_base_whose_packages_cannot_be_named_is_refused(release, tmp_path):
    image = support.image_of(tmp_path, {"usr/lib/os-release": "ID=debian\n", "var/lib/apk": ""})
    with pytest.raises(Failure, match="no /var/lib/dpkg/status: choose a base of Debian"):
        release.base_packages(image)
    (tmp_path / "ours").write_text(STATUS)
    (tmp_path / "0/var/lib/dpkg").mkdir()
    (tmp_path / "0/var/lib/dpkg/status").symlink_to(tmp_path / "ours")
    with pytest.raises(Failure, match="no /var/lib/dpkg/status"):  # never that of this machine
        release.base_packages(image)


def test_the_provenance_names_what_was_made_and_of_what(release, checkout, tmp_path):
    (tmp_path / "crd.yaml").write_text("crd")
    release.provenance(
        checkout, tmp_path, "0.1.0", [], [f"docker.io/ddpjob/operator:0.1.0{DIGEST}"]
    )
    statement = json.loads((tmp_path / "provenance.json").read_text())
    assert statement["subject"] == [
        {"name": "crd.yaml", "digest": {"sha256": hashlib.sha256(b"crd").hexdigest()}},
        {"name": "docker.io/ddpjob/operator:0.1.0", "digest": {"sha256": "a" * 64}},
    ]
    built = statement["predicate"]["buildDefinition"]
    commit, *others, base, helm = built["resolvedDependencies"]
    head = release.git(checkout, "rev-parse", "HEAD")
    assert commit == {"name": "commit", "digest": {"gitCommit": head}}
    locks = {path.name: path for path in (checkout / "dev/requirements").glob("*.txt")}
    assert {each["name"] for each in others} == {
        "Dockerfile",
        *(f"dev/requirements/{x}" for x in locks),
    }
    for each in others:
        there = hashlib.sha256((checkout / each["name"]).read_bytes()).hexdigest()
        assert each["digest"] == {"sha256": there}
    uri = f"docker://docker.io/library/python:3.11-slim{DIGEST}"
    assert base == {"uri": uri, "digest": {"sha256": "a" * 64}}
    assert helm == {"uri": "pkg:golang/helm.sh/helm/v4/cmd/helm@" + binaries.MODULES["helm"][1]}
    assert built["externalParameters"] == {"version": "0.1.0", "images": True, "draft": []}


def test_the_base_is_pinned_in_the_dockerfile_and_a_release_takes_it(
    release, checkout, tmp_path, monkeypatch, capsys
):
    crane = tmp_path / "crane"
    monkeypatch.setattr(binaries, "ensure", lambda names, say: {"crane": crane})

    def registry(answer: str) -> None:
        crane.write_text(f"#!/bin/sh\n[ \"$*\" = 'digest {name}' ] && {answer}\n")
        crane.chmod(0o755)

    before = (checkout / "Dockerfile").read_text()
    [line] = [line for line in before.splitlines() if line.startswith("ARG BASE_IMAGE=")]
    name = line.removeprefix("ARG BASE_IMAGE=").partition("@")[0]
    for answer in ("echo '<html>'", "echo no network >&2; exit 1"):
        registry(answer)
        with pytest.raises(Failure, match=r"nothing is changed|failed: no network"):
            release.pin_base(checkout)
        assert (checkout / "Dockerfile").read_text() == before
    for digit in "ab":  # once more, for the digest of another day
        registry(f"echo sha256:{digit * 64}")
        pinned = f"{name}@sha256:{digit * 64}"
        assert release.pin_base(checkout) == pinned
        after = (checkout / "Dockerfile").read_text()
        assert after == before.replace(f"{line}\n", f"ARG BASE_IMAGE={pinned}\n")

    monkeypatch.delenv("DDPJOB_BASE_IMAGE")
    monkeypatch.setattr(release, "ROOT", checkout)
    monkeypatch.setattr(release, "release", lambda *_: print(os.environ["DDPJOB_BASE_IMAGE"]))
    assert release.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{pinned}\n"


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
