"""gpu-check as it runs without a GPU: what means anything there passes, the rest says why not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import PATHS, ROOT, RUN, finished
from support.rounds import alive

pytestmark = pytest.mark.tier("all")
GPU_CHECK = ("-m", "ddpjob_tools", "gpu-check")


@pytest.mark.parametrize("numbers", ["1,2,3,4,6,7", "5,8"])
def test_on_the_cpu(tmp_path: Path, numbers: str) -> None:
    report = tmp_path / "report.json"
    words = ("--device", "cpu", "--nproc", 3, "--checks", numbers, "--json", report)
    code, out = finished(*GPU_CHECK, *words)
    assert code == 0, out
    found = json.loads(report.read_text())["checks"]
    assert {str(check["number"]) for check in found} == set(numbers.split(","))
    for check in found:
        if check["number"] != 1:  # what this machine is like is no business of a test
            assert check["verdict"] == ("SKIP" if check["number"] in (3, 6) else "PASS"), out


def test_no_gpu() -> None:
    code, out = finished(*GPU_CHECK, "--quick", CUDA_VISIBLE_DEVICES="")
    assert code == 64
    assert out.startswith("gpu-check: no GPU: ")


def test_what_it_has_started_ends_with_it(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """Also by SIGKILL: launchers that run on would hold all the GPUs."""
    there, script = tmp_path / "pid", tmp_path / "script.py"
    script.write_text(f"""
import os, time
with open("{there}.draft", "w") as draft:
    draft.write(f"{{os.getppid()}} {{os.getpid()}}")
os.rename("{there}.draft", "{there}")
time.sleep(3600)
""")
    complete = "import sys; from ddpjob_tools.gpu_check import launches;"
    complete += " launches.complete(sys.argv[1:], {})"
    command = [sys.executable, "-c", complete, *RUN, str(script)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": PATHS}) as check:
        try:
            wait_until(there.exists, "a launcher and its worker")
            started = list(map(int, there.read_text().split()))
            assert all(map(alive, started))
        finally:
            check.kill()
    try:
        wait_until(lambda: not any(map(alive, started)), "nothing runs on")
    finally:
        for pid in filter(alive, started):
            os.kill(pid, signal.SIGKILL)


def test_the_benchmark_comes_to_its_table(tmp_path: Path) -> None:
    """dev/bench/gpu.py with a tiny model: who rents a GPU for it is to find no mistake in it."""
    report = tmp_path / "report.json"
    words = ("--quick", "--nproc", 2, "--kills", 1, "--json", report)
    code, out = finished(ROOT / "dev/bench/gpu.py", *words, CUDA_VISIBLE_DEVICES="")
    assert code == 0, out
    found = json.loads(report.read_text())
    for level in ("off", "resume"):
        assert found[f"speed {level}"]["tokens_per_second"] > 0
        assert found[f"speed {level}"]["kernels"]
    for way in ("in place", "new launch"):
        (one,) = found[f"recovery {way}"]
        assert one["came_back"]
        assert one["repeated"] > 0
        assert {"process, imports", "model built", "restored", "first step"} <= set(one["stages"])
    assert len(found["stall"]["seconds"]) == 4
    for row in ("off +resume +more +kernel", "a snapshot every 10 steps ", "first step"):
        assert re.search(f"^{row}", out, re.MULTILINE), row  # columns are as wide as the figures
