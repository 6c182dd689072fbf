"""What is said of a volume that does not take snapshots: once, and ever more rarely."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import HashStore

from ddpjob_trainer.snapshot import skips
from ddpjob_trainer.snapshot.part_reports import PartReports, Report
from ddpjob_trainer.snapshot.pipeline import Unfinished


def test_it_is_said_again_each_time_that_the_wait_has_doubled(monkeypatch):  # type: ignore[no-untyped-def]
    reports = PartReports(HashStore(), (0, 2))
    reports.post(8, Report(0))
    oldest, said = Unfinished(8, 0.0, None), skips.Skips()

    def at(seconds: float) -> Any:
        monkeypatch.setattr(skips.time, "perf_counter", lambda: seconds)
        return said.why(oldest, reports)

    told = [s for s in range(5, 1000, 5) if at(s)]
    assert told == [5, 60, 120, 240, 480, 960]
    said.over()
    assert "that of step 8 for 7 s by rank 2. Is its volume slow, or stuck?" in at(7)
    oldest.asked = True
    said.over()
    assert "by rank 0." in at(7)
