"""gpu-check as it runs without a GPU: what means anything there passes, the rest says why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import PATHS, SOURCES
from support.patience import WHOLE

pytestmark = pytest.mark.tier("all")


def gpu_check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpjob_trainer", "gpu-check", *words],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True, text=True, timeout=WHOLE, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("numbers", ["1,2,3,4,6,7", "5,8"])
def test_on_the_cpu(tmp_path: Path, numbers: str) -> None:
    report = tmp_path / "report.json"
    done = gpu_check("--device", "cpu", "--nproc", "3", "--checks", numbers, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())["checks"]
    assert {str(check["number"]) for check in found} == set(numbers.split(","))
    for check in found:
        if check["number"] != 1:  # what this machine is like is no business of a test
            expected = "SKIP" if check["number"] in (3, 6) else "PASS"
            assert check["verdict"] == expected, done.stdout


def test_what_it_has_started_ends_with_it(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """Also by SIGKILL: launchers that run on would hold all the GPUs."""
    there = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, pathlib, time
draft = pathlib.Path({str(there)!r} + ".draft")
draft.write_text(f"{{os.getppid()}} {{os.getpid()}}")
draft.rename({str(there)!r})
time.sleep(3600)
""")
    command = [sys.executable, "-m", "ddpjob_trainer", "run", str(script)]
    complete = "import sys; from ddpjob_tools.gpu_check import launches;"
    complete += " launches.complete(sys.argv[1:], {})"
    check = subprocess.Popen(
        [sys.executable, "-c", complete, *command],
        env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    try:
        wait_until(there.exists, "a launcher and its worker")
        started = [Path(f"/proc/{pid}") for pid in there.read_text().split()]
        assert all(path.exists() for path in started)
    finally:
        check.kill()
        check.wait()
    try:
        wait_until(lambda: not any(map(_runs, started)), "nothing runs on")
    finally:
        for path in filter(_runs, started):
            os.kill(int(path.name), signal.SIGKILL)


def _runs(process: Path) -> bool:
    """Not gone, nor waiting for whoever adopts orphans here."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = gpu_check("--quick")
    assert done.returncode == 64
    assert done.stderr.startswith("gpu-check: no GPU: ")


def test_the_benchmark_comes_to_its_table(tmp_path: Path) -> None:
    """bench/gpu.py with a tiny model: whoever rents a GPU for it is not to find a mistake in it."""
    report = tmp_path / "report.json"
    words = ("--quick", "--nproc", "2", "--kills", "1", "--json", str(report))
    done = subprocess.run(
        [sys.executable, str(SOURCES.parents[1] / "bench/gpu.py"), *words],
        env={**os.environ, "PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=WHOLE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert set(found["tokens_per_second"]) == {"off", "resume"}
    assert min(found["tokens_per_second"].values()) > 0
    assert {way: len(times) for way, times in found["recovery_seconds"].items()} == {
        "in place": 1, "new launch": 1,
    }  # fmt: skip
    for row in ("tokens/s per process, level off ", "MFU ", "stall, a snapshot every 10 steps "):
        assert f"\n{row}" in done.stdout
