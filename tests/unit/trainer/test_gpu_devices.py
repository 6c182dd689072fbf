"""What /dev and the environment tell of GPUs, in one place for all that ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob_trainer.gpu import devices

VISIBLE, OF_IMAGES = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
DRIVER = ("nvidiactl", "nvidia-uvm", "nvidia-caps", "null")  # no GPU by itself
TWO = "nvidia0 nvidia1"


@pytest.mark.parametrize(
    ("names", "env", "found"),  # how many, may there be any, visible, given, misnamed
    [
        ("", {}, (0, False, 0, False, "")),
        ("nvidia10", {}, (1, True, 1, True, "")),
        ("kfd", {}, (0, True, 0, False, "")),  # AMD's does not say what to train on
        (TWO, {}, (2, True, 2, True, "")),
        (TWO, {VISIBLE: ""}, (2, True, 0, False, "")),
        ("nvidia0", {VISIBLE: "1,3"}, (1, True, 2, True, "1")),
        (TWO, {VISIBLE: "0,-1,1"}, (2, True, 1, True, "")),
        (TWO, {VISIBLE: "-1"}, (2, True, 0, False, "")),
        (TWO, {VISIBLE: "0,7"}, (2, True, 2, True, "")),
        (TWO, {VISIBLE: "2"}, (2, True, 1, True, "2")),
        (TWO, {VISIBLE: "GPU-8f7a"}, (2, True, 1, True, "")),
        ("", {VISIBLE: "2"}, (0, False, 1, False, "")),  # a shell may say so always
        ("", {OF_IMAGES: "all"}, (0, False, 0, False, "")),  # its images say so always
        ("", {OF_IMAGES: "GPU-8f7a"}, (0, False, 0, True, "")),
    ],
)
def test_what_dev_and_the_environment_say(tmp_path, monkeypatch, names, env, found):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(devices, "_DEV", tmp_path / "no such folder")
    assert not devices.any_here()
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    for name in (*DRIVER, *names.split()):
        (tmp_path / name).touch()
    assert found == (
        devices.count(), devices.any_here(), devices.visible(env), devices.given(env),
        devices.misnamed(env),
    )  # fmt: skip


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
