"""gpu-check as it runs without a GPU: what means anything there passes, the rest says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpjob_trainer.gpu_check import launches
from ddpjob_trainer.gpu_check.launches import Setup
from support.launching import SOURCES


def gpu_check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpjob_trainer", "gpu-check", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("numbers", ["1,2,3,4,6,7", "8,9,10,11"])
def test_on_the_cpu(tmp_path: Path, numbers: str) -> None:
    report = tmp_path / "report.json"
    done = gpu_check("--device", "cpu", "--nproc", "3", "--checks", numbers, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())["checks"]
    assert {str(check["number"]) for check in found} == set(numbers.split(","))
    skipped = {check["number"] for check in found if check["verdict"] == "SKIP"}
    assert skipped == {3, 6, 10, 11} & {int(number) for number in numbers.split(",")}
    # Speed and stall of this machine are no business of a test.
    told = {check["number"]: check["verdict"] for check in found if check["number"] in (2, 4, 7, 8)}
    assert set(told.values()) == {"PASS"}, done.stdout


@pytest.mark.parametrize("given", [("cnn", "resume", "bf16"), ("transformer", "elastic", "fp16")])
def test_bits_on_the_cpu(tmp_path: Path, given: tuple[str, str, str]) -> None:
    """Two of the nine trainings of check 5."""
    model, level, precision = given
    words = ("--model", model, "--level", level, "--precision", precision)
    launch = launches.chaos(Setup(3, False, tmp_path, {}), *words, kills=2)
    assert launch.code == 0, launch.output
    assert "identical" in launch.output


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = gpu_check("--quick")
    assert done.returncode == 64
    assert done.stderr.startswith("gpu-check: no GPU: ")
