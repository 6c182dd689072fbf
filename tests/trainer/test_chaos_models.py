"""Training as people do it, under kills at 3 and 4 ranks: the examples end in equal bits.

Two models with two optimizers; two optimizers on one model; dict batches with gradient
accumulation, a moving average and the scaler of fp16; a DataLoader with two workers; a stream with
a state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATHS, SOURCES
from support.patience import PATIENCE, WHOLE

pytestmark = pytest.mark.tier("all")

EXAMPLES = SOURCES.parents[1] / "examples"
SCRIPTS = ("gan.py", "muon.py", "text.py", "loader.py", "stream.py")
KILLS = 3


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("nproc", [3, 4])
@pytest.mark.fault("T1", "T4")
def test_an_example_survives_kills_bit_for_bit(tmp_path: Path, script: str, nproc: int) -> None:
    report = tmp_path / "report.json"
    program = (str(EXAMPLES / script), "--total-steps", "20")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ddpjob_trainer", "chaos", "--nproc", str(nproc)),
            *("--kills", str(KILLS), "--every", "4", "--seed", str(nproc)),
            *("--signals", "KILL,TERM", "--patience", str(PATIENCE)),
            *("--json", str(report), *program),
        ],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WHOLE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    result = json.loads(report.read_text())
    assert result["identical"]
    assert len(result["kills"]) == KILLS
    assert any(result["restarts"]), "one went on from a snapshot"
