"""What makes an image another one, which names are ours, how a build reaches the package index."""

import shutil
from pathlib import Path

import pytest

from devcluster import Failure, venv
from devcluster.oci import images
from support import release


def keys(checkout: Path = images.CHECKOUT) -> dict[str, str]:
    return {target: images.image_key(target, checkout) for target in images.TARGETS}


def test_a_change_of_an_input_makes_other_images_of_those_made_of_it(tmp_path, monkeypatch):
    for name in {*images._COMMON, *images._INPUTS["operator"], *images._INPUTS["trainer"]}:
        source, target = images.CHECKOUT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    before = keys(tmp_path)
    assert before == keys(), "equal inputs, wherever the checkout is"
    for path, changed in {
        "trainer/src/ddpjob_trainer/cli.py": {"trainer"},
        "trainer/src/ddpjob_trainer/new.py": {"trainer"},
        "tools/src/ddpjob_tools/new.py": {"trainer"},
        "trainer/src/ddpjob_trainer/__pycache__/cli.cpython-311.pyc": set(),
        "contract/src/ddpjob_contract/__init__.py": {"operator", "trainer"},
        "examples/digits.py": {"trainer"},
        "dev/requirements/torch.txt": {"trainer"},
        "operator/src/ddpjob_operator/__init__.py": {"operator"},
        "dev/requirements/operator.txt": {"operator"},
        "dev/requirements/install.sh": {"operator", "trainer"},
        "Dockerfile": {"operator", "trainer"},
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        with (tmp_path / path).open("a") as file:
            file.write("\n")
        after = keys(tmp_path)
        assert {target for target in after if before[target] != after[target]} == changed, path
        before = after
    monkeypatch.setenv("DDPJOB_BASE_IMAGE", "python:3.12-slim")
    assert all(before[target] != key for target, key in keys(tmp_path).items())
    (tmp_path / "dev/requirements/torch.txt").unlink()
    with pytest.raises(Failure, match=r"dev/requirements/torch\.txt is missing"):
        keys(tmp_path)


def test_the_forms_of_a_name_are_ours_and_others_are_refused_with_the_cure():
    for name in ("trainer", "ddpjob/trainer:0.1.0", "docker.io/ddpjob/trainer:0.1.0"):
        assert images._target_of(name) == "trainer"
    for name in ("ddpjob/trainer:9", "nginx", "/no/such/file.tar"):
        with pytest.raises(Failure, match=r"docker save.*load that file"):
            images.load_into([], name, lambda line: None)


@pytest.mark.parametrize(
    "make",
    [
        lambda requirements: venv.ensure_environment(requirements, print),
        lambda requirements: venv.ensure_other_torch(requirements, "1", print),
        lambda requirements: venv.write_locks(requirements, [], print),
    ],
    ids=["an environment", "another torch", "lock files"],
)
def test_a_source_archive_is_never_built(tmp_path, monkeypatch, make):
    monkeypatch.setattr(venv, "_LOCKS", ("dev",))
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    shutil.copy(images.CHECKOUT / "dev/requirements/uv.txt", requirements)
    uv = venv.ensure_uv(requirements, print)
    monkeypatch.setenv("DDPJOB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / uv.name).symlink_to(uv)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    (requirements / "dev.txt").write_text(release.source_archive(tmp_path))
    (requirements / "dev.in").write_text("evil\n")
    with pytest.raises(Failure, match=r"uv pip \S+ .* failed"):
        make(requirements)
    assert not (tmp_path / "ran").exists()


def test_an_image_is_made_of_wheels():
    script = (images.CHECKOUT / "dev/requirements/install.sh").read_text().replace("\\\n", "")
    installs = [line for line in script.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes --only-binary=:all:" in line for line in installs)
