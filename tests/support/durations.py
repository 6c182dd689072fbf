"""Keep the seconds of each test: `make test-all` measures them, the order of files follows.

pytest's reports -> Recorder -> docs/internals/test-durations.json -> sharing.longest_first.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/internals/test-durations.json"
_WORTH_KEEPING: Final = 0.2  # seconds of a test


class Recorder:
    """A pytest plugin of the parent: adds up what the reports of all workers tell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._commit = _commit()  # before anything of it is written
        self.seconds: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Replace what is kept of all files that were run, and keep the others."""
        ran = {file_of(name) for name in self.seconds}
        tests = {n: s for n, s in known().items() if file_of(n) not in ran}
        tests |= {name: s for name, s in self.seconds.items() if s >= _WORTH_KEEPING}
        there = sorted(name for name in tests if (ROOT / file_of(name)).exists())
        found = {
            "on": datetime.now(UTC).date().isoformat(),
            "commit": self._commit,
            "workers": self._config.getoption("numprocesses", None) or 1,
            "cores": len(os.sched_getaffinity(0)),
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "whole": exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
            "outcomes": dict(sorted(self.outcomes.items())),
            "tests": {name: round(tests[name], 1) for name in there},
        }
        RESULTS.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")


def known() -> dict[str, float]:
    """Return the seconds of the longer tests."""
    found: dict[str, float] = json.loads(RESULTS.read_text())["tests"] if RESULTS.exists() else {}
    return found


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
