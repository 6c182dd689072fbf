"""Training as people do it, under kills at 3 and 4 ranks: the examples end in equal bits.

Two models with two optimizers; two optimizers on one model; dict batches with gradient
accumulation, a moving average and the scaler of fp16; a DataLoader with two workers; a stream with
a state.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import ROOT, finished
from support.patience import PATIENCE


@pytest.mark.tier("all")
@pytest.mark.parametrize("script", ["gan.py", "muon.py", "text.py", "loader.py", "stream.py"])
@pytest.mark.parametrize("nproc", [3, 4])
@pytest.mark.fault("T1", "T4")
def test_an_example_survives_kills_bit_for_bit(tmp_path: Path, script: str, nproc: int) -> None:
    report = tmp_path / "report.json"
    code, out = finished(
        *("-m", "ddpjob_trainer", "chaos", "--nproc", nproc, "--kills", 3, "--every", 4),
        *("--seed", nproc, "--signals", "KILL,TERM", "--patience", PATIENCE, "--json", report),
        *(ROOT / "examples" / script, "--total-steps", 20),
    )
    assert code == 0, out
    result = json.loads(report.read_text())
    assert result["identical"]
    assert len(result["kills"]) == 3
    assert any(result["restarts"]), "one went on from a snapshot"
