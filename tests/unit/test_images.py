"""An image is made of wheels alone, whose hashes are known: no source archive is built."""

import shutil

import pytest

from devcluster import Failure, venv
from devcluster.oci import images
from support import release


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
