"""What /dev and the environment tell of GPUs, in one place for all that ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob_trainer.gpu import devices


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(devices, "_DEV", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / "dev" / name).touch()
    return tmp_path / "dev"


def test_a_driver_alone_is_no_gpu(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (devices.count(), devices.any_here(), devices.given({})) == (0, False, False)
    (dev / "nvidia10").touch()
    assert (devices.count(), devices.any_here(), devices.given({})) == (1, True, True)
    monkeypatch.setattr(devices, "_DEV", dev / "no such folder")
    assert not devices.any_here()


def test_amds_file_does_not_say_what_to_train_on(dev: Path) -> None:
    (dev / "kfd").touch()
    assert (devices.count(), devices.any_here(), devices.given({})) == (0, True, False)


@pytest.mark.parametrize(
    ("visible", "nodes", "gpus"),
    [(None, 2, 2), (None, 0, 0), ("", 1, 0), ("1,3", 1, 2), ("0,-1,1", 1, 1), ("-1", 1, 0)],
)
def test_they_are_counted_as_cuda_would(
    dev: Path, visible: str | None, nodes: int, gpus: int
) -> None:
    for number in range(nodes):
        (dev / f"nvidia{number}").touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.visible(env) == gpus
    assert devices.given(env) == (gpus > 0)


def test_what_a_container_was_given(dev: Path) -> None:
    assert not devices.given({"NVIDIA_VISIBLE_DEVICES": "all"}), "its images say so always"
    assert not devices.given({"CUDA_VISIBLE_DEVICES": "0"}), "a shell may say so always"
    assert devices.given({"NVIDIA_VISIBLE_DEVICES": "GPU-8f7a"})


@pytest.mark.parametrize(
    ("visible", "first"), [("0,7", ""), ("2", "2"), ("1", ""), ("GPU-8f7a", ""), ("", "")]
)
def test_a_number_that_no_gpu_has(dev: Path, visible: str, first: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.misnamed(env) == "", "of none there is nothing to be said"
    for number in range(2):
        (dev / f"nvidia{number}").touch()
    assert devices.misnamed(env) == first


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86  Release", "570.86"),
        ("something else", ""),
        (None, ""),
    ],
)
def test_the_drivers_version_is_that_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, version: str
) -> None:
    monkeypatch.setattr(devices, "_MODULE", tmp_path / "version")
    if told is not None:
        (tmp_path / "version").write_text(told)
    assert devices.driver_version() == version
