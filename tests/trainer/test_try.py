"""`make try` as a newcomer starts it: a process is killed, the weights are those undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.cluster import ROOT
from support.launching import PATHS
from support.patience import WHOLE


@pytest.mark.tier("all")
def test_a_killed_process_changes_no_bit_and_the_reader_sees_it() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "demo/local.py"],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=WHOLE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- kill -9 " in done.stdout
    assert "restart proven: " in done.stdout
    assert "  restarts in place          1 (a process was killed)\n" in done.stdout
    assert "  the two are                identical\n" in done.stdout


def test_make_try_needs_the_environment_only() -> None:
    """Neither root nor Go: what `programs` and `images` of other targets build."""
    text = (ROOT / "Makefile").read_text()
    assert "\ntry: setup ##" in text
    assert "\n\t@$(BIN)/python demo/local.py" in text
