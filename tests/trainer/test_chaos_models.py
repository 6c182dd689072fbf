"""Training as people do it, under kills at 3 and 4 ranks: the examples end in equal bits.

Two models with two optimizers; two optimizers on one model; dict batches with gradient
accumulation, a moving average and the scaler of fp16; a DataLoader with two workers; a stream with
a state. With four ranks it is done on a busy machine, in `make soak`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.busy import busy_machine
from support.launching import SOURCES
from support.patience import PATIENCE

EXAMPLES = SOURCES.parents[1] / "examples"
SCRIPTS = ("gan.py", "muon.py", "text.py", "loader.py", "stream.py")
KILLS = 3
CASES = [
    *((script, 3) for script in SCRIPTS),
    *(pytest.param(script, 4, marks=pytest.mark.soak) for script in SCRIPTS),
]


@pytest.mark.parametrize(("script", "nproc"), CASES)
@pytest.mark.fault("T1", "T4")
def test_an_example_survives_kills_bit_for_bit(tmp_path: Path, script: str, nproc: int) -> None:
    report = tmp_path / "report.json"
    program = (str(EXAMPLES / script), "--total-steps", "20")
    with busy_machine() if nproc == 4 else contextlib.nullcontext():
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ddpjob_trainer", "chaos", "--nproc", str(nproc)),
                *("--kills", str(KILLS), "--every", "4", "--seed", str(nproc)),
                *("--signals", "KILL,TERM", "--patience", str(PATIENCE)),
                *("--json", str(report), *program),
            ],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    result = json.loads(report.read_text())
    assert result["identical"]
    assert result["planned"] == KILLS
    assert any(kill["how"] in ("in place", "new launch") for kill in result["kills"])
