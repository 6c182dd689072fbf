"""One rank's metrics: files named after the rank, counters that survive their process."""

import os
import subprocess
import sys
from pathlib import Path

from ddpjob_trainer.launcher.reports.endpoints import LauncherMetrics, as_text, forget_dead
from support.launching import PATHS
from support.patience import PATIENCE

_PROCESS = """
import os, signal, sys
from ddpjob_trainer.telemetry.metrics import Metrics
metrics = Metrics(int(sys.argv[1]))
metrics.set("step", float(sys.argv[2]))
metrics.add("samples", 10)
metrics.add("phase_seconds", 0.5, "data")
metrics.observe("step_seconds", 0.02)
metrics.flush()
if os.fork() == 0:
    metrics.add("samples", 1000)
    metrics.flush()
    os._exit(0)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(directory: Path, rank: int, step: int) -> None:
    more = {"PROMETHEUS_MULTIPROC_DIR": str(directory), "PYTHONPATH": PATHS}
    command = [sys.executable, "-c", _PROCESS, str(rank), str(step)]
    assert subprocess.call(command, env={**os.environ, **more}, timeout=PATIENCE) == -9


def test_restarts_leave_no_files_and_lose_no_counts(tmp_path):
    for round_ in range(4):
        for rank in (0, 1):
            run(tmp_path, rank, 100 * round_ + rank)
        forget_dead(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"{kind}_rank{rank}.db"
            for kind in ("counter", "gauge_mostrecent", "histogram")
            for rank in (0, 1)
        ]
    text = as_text(tmp_path, LauncherMetrics()).decode()
    for rank in (0, 1):
        assert f'ddpjob_trainer_step{{rank="{rank}"}} {300 + rank}.0' in text
        assert f'ddpjob_trainer_samples_total{{rank="{rank}"}} 40.0' in text
        assert f'ddpjob_trainer_step_seconds_count{{rank="{rank}"}} 4.0' in text
    assert text.count("ddpjob_trainer_step{") == 2
    (tmp_path / "counter_rank2.db").touch()  # one that is being made
    assert as_text(tmp_path, LauncherMetrics()).decode() == text


def test_the_metrics_that_a_spares_imports_have_made_are_kept(tmp_path):
    (tmp_path / f"counter_{os.getpid()}.db").touch()
    (tmp_path / f"counter_{2**22 + 1}.db").touch()
    forget_dead(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"counter_{os.getpid()}.db"]
