"""The task runner: the same core under the launcher, alone and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import SOURCES
from support.patience import WHOLE

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).parents[2]
TASK = str(ROOT / "examples/task_digits.py")
OPTIONS = ("--global-batch", "48", "--seed", "7", "--bucket-cap-mb", "0.05")

TINY = """
import sys, torch
from torch.utils.data import TensorDataset
width = int(sys.argv[sys.argv.index("--width") + 1]) if "--width" in sys.argv else 4
def build_model(): return torch.nn.Linear(4, width)
def build_dataset(): return TensorDataset(torch.ones(30, 4))
def loss(model, batch): return model(batch[0]).pow(2).mean()
"""


def task(*arguments: str, **env: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ddpjob_trainer", "task", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), **env}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WHOLE, check=False
    )
    return done.returncode, done.stdout + done.stderr


def value(name: str, output: str) -> str:
    found = re.findall(rf"\b{name}=(\S+)$", output, re.MULTILINE)
    assert found, output[-2000:]
    return str(found[-1])


def test_three_processes_stop_and_go_on_as_if_they_had_not(tmp_path):  # type: ignore[no-untyped-def]
    every = ("--snapshot-every", "10", "--nproc", "3", TASK, *OPTIONS)
    code, whole = task(*every, "--total-steps", "30", "--snapshot-dir", str(tmp_path / "a"),
                       "--eval-every", "20")  # fmt: skip
    assert code == 0, whole
    assert len(re.findall(r"evaluation=", whole)) == 2
    directory = tmp_path / "a"
    for manifest in directory.glob("*/step-*.json"):
        if int(manifest.stem.split("-")[1]) > 10:
            manifest.unlink()
    code, resumed = task(*every, "--total-steps", "30", "--snapshot-dir", str(directory),
                         "--workers", "2")  # fmt: skip
    assert code == 0, resumed
    assert "resuming after step 10" in resumed
    assert value("weights_sha256", resumed) == value("weights_sha256", whole)
    assert value("evaluation", resumed) == value("evaluation", whole)
    assert float(value("evaluation", whole)) > 0.2


def test_what_follows_two_dashes_is_the_tasks_own(tmp_path):  # type: ignore[no-untyped-def]
    path = tmp_path / "random.py"  # named like a library that torch needs
    path.write_text(TINY)
    code, wide = task(str(path), "--total-steps", "2", "--global-batch", "6", "--", "--width", "64")
    assert code == 0, wide
    code, narrow = task("--total-steps", "2", str(path), "--global-batch=6", "--log-every=1")
    assert code == 0, narrow
    assert value("weights_sha256", wide) != value("weights_sha256", narrow)
    assert "step 1/2 loss" in narrow


def test_what_is_missing_is_named(tmp_path):  # type: ignore[no-untyped-def]
    code, out = task(str(tmp_path / "none.py"), "--total-steps", "2", "--global-batch", "6")
    assert (code, "none.py: no such task file" in out) == (127, True)
    path = tmp_path / "half.py"
    path.write_text("def build_model(): ...\n")
    code, out = task(str(path), "--total-steps", "2", "--global-batch", "6")
    assert code == 64, out
    assert "must define build_dataset(), loss()" in out
    code, out = task(str(path), "--global-batch", "6")
    assert code == 2
    assert "--total-steps" in out


def test_help_names_every_option_of_prepare_and_start():  # type: ignore[no-untyped-def]
    code, out = task("--help")
    assert code == 0
    for words in ("--nproc", "--micro-batches", "--comm-hook", "build_model()", "-- --width 64"):
        assert words in out
