"""What is said of a volume that does not take snapshots: once, and ever more rarely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles
from ddpjob_trainer.snapshot.save import writer as module
from ddpjob_trainer.snapshot.save.part_reports import PartReports, Report
from ddpjob_trainer.snapshot.save.writer import SnapshotWriter


def test_it_is_said_again_each_time_that_the_wait_has_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = PartReports(HashStore(), (0, 2))
    reports.post(8, Report(0))
    cpu = accelerator.of(torch.device("cpu"))
    monkeypatch.setattr(module.threading.Thread, "start", lambda _: None)
    writer = SnapshotWriter(0, SnapshotFiles(tmp_path, 1, "n", 2), reports, cpu)

    def at(seconds: float) -> str:
        monkeypatch.setattr(module.time, "perf_counter", lambda: seconds)
        return writer.behind()

    assert at(100) == "", "nothing is being written"
    writer._snapshots[8] = 0.0, None
    told = [s for s in range(5, 1000, 5) if at(s)]
    assert told == [60, 120, 240, 480, 960]
    nothing: dict[str, Any] = {}
    writer.save(9, 0.0, "no state", nothing)  # there was room
    assert "that of step 8 for 70 s by rank 2. Is its volume slow, or stuck?" in at(70)
    reports.post(8, Report(2))
    assert reports.complete(8)  # rank 0 is writing the manifest
    assert "by rank 0." in at(140)
