"""What is said of a volume that does not take snapshots: once, and ever more rarely."""

from __future__ import annotations

import time
from typing import Any

from torch._C._distributed_c10d import HashStore

from ddpjob_trainer.snapshot.save import writer
from ddpjob_trainer.snapshot.save.part_reports import PartReports, Report
from ddpjob_trainer.snapshot.save.writer import GONE, BackpressureLog, Unfinished, failed


def test_it_is_said_again_each_time_that_the_wait_has_doubled(monkeypatch):  # type: ignore[no-untyped-def]
    reports = PartReports(HashStore(), (0, 2))
    reports.post(8, Report(0))
    oldest, said = Unfinished(8, 0.0), BackpressureLog()

    def at(seconds: float) -> Any:
        monkeypatch.setattr(writer.time, "perf_counter", lambda: seconds)
        return said.why(oldest, reports)

    told = [s for s in range(5, 1000, 5) if at(s)]
    assert told == [60, 120, 240, 480, 960]
    said.over()
    assert "that of step 8 for 70 s by rank 2. Is its volume slow, or stuck?" in at(70)
    reports.post(8, Report(2))
    assert reports.complete(8)  # rank 0 is writing the manifest
    said.over()
    assert "by rank 0." in at(70)


def test_quick_steps_ahead_of_a_busy_disk_are_no_alarm():  # type: ignore[no-untyped-def]
    reports, said = PartReports(HashStore(), (0, 2)), BackpressureLog()
    for _ in range(100):
        oldest = Unfinished(8, time.perf_counter())
        assert said.why(oldest, reports) == said.why(None, reports) == ""


def test_what_is_gone_is_not_said_to_be_there():  # type: ignore[no-untyped-def]
    full = "No space left on device; training goes on, the newest snapshot is "
    assert failed(8, "No space left on device", 4).endswith(f"failed: {full}that of step 4")
    assert failed(8, "No space left on device", -1).endswith(f"{full}none")
    gone = failed(8, f"rank 1: /snapshots/00000001 is gone: {GONE}", 4)
    assert "step 4" not in gone
    assert gone.endswith("training goes on, and this run's snapshots may be gone with it")
