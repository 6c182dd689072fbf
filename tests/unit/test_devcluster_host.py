"""What the devcluster needs of the host: packages are installed once, and leave no service."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster import host
from devcluster.failure import Failure


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH, but for what every script needs."""
    found = tmp_path / "programs"
    found.mkdir()
    for name in ("sh", "touch", "chmod"):
        (found / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(found))
    monkeypatch.setattr(host, "LOCKS", tmp_path / "locks")
    (tmp_path / "systemd").mkdir()
    monkeypatch.setattr(host, "_SYSTEMD", tmp_path / "systemd")
    return found


def script(programs: Path, name: str, text: str) -> None:
    (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{programs}.log\n{text}\n')
    (programs / name).chmod(0o755)


def said(programs: Path) -> list[str]:
    return Path(f"{programs}.log").read_text().splitlines()


def install(programs: Path, *names: str) -> str:
    """What an apt-get does that installs these programs."""
    files = [programs / name for name in names]
    return "\n".join(f"[ $1 = update ] || {{ touch {one}; chmod +x {one}; }}" for one in files)


def test_the_service_of_a_containerd_that_was_installed_now_is_stopped(programs: Path) -> None:
    script(programs, "apt-get", install(programs, "containerd"))
    script(programs, "systemctl", "")
    host.ensure_packages({"containerd": "containerd"}, print)
    update, installed, silenced = said(programs)
    assert update.startswith("apt-get update")
    assert installed.endswith(" containerd")
    assert all("DPkg::Lock::Timeout=600" in line for line in (update, installed))
    assert silenced == "systemctl disable --now containerd"
    host.ensure_packages({"containerd": "containerd"}, print)
    assert len(said(programs)) == 3


def test_the_service_of_a_containerd_that_was_there_is_left_alone(programs: Path) -> None:
    script(programs, "containerd", "")
    script(programs, "apt-get", install(programs, "ctr"))
    script(programs, "systemctl", "")
    host.ensure_packages({"containerd": "containerd", "ctr": "containerd"}, print)
    assert not any(line.startswith("systemctl") for line in said(programs))


def test_why_nothing_could_be_installed_is_told(programs: Path) -> None:
    script(programs, "apt-get", 'echo "E: $1 has no network" >&2; exit 100')
    with pytest.raises(Failure, match=r"update has no network.* install has no network"):
        host.ensure_packages({"containerd": "containerd"}, print)
    assert (host.LOCKS / "apt.lock").exists()
