"""Keep the seconds of each test: `make test-all` measures them, the order of files follows.

pytest's reports -> Recorder -> docs/internals/test-durations.json -> `page`, sharing.longest_first.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/internals/test-durations.json"
PAGE = ROOT / "docs/internals/test-durations.md"
_SHOWN_FILES: Final = 60
_SHOWN_TESTS: Final = 40
_WORTH_KEEPING: Final = 0.2  # seconds of a test; below, only its file's sum has it

HEAD = """# Where the time of the tests goes

Seconds of setup, call and teardown, as the tests ran side by side: most of them wait, for others'
use of the processors, too. `make test-all` measures them anew and writes this page. The order of
files in every run, longest first, follows from them.
"""


class Recorder:
    """A pytest plugin of the parent: adds up what the reports of all workers tell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._commit = _commit()  # before anything of it is written
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Replace what is kept of all files that were run, and keep the others."""
        kept = known()
        ran = summed(self.seconds)
        tests = {name: s for name, s in self.seconds.items() if s >= _WORTH_KEEPING}
        files = {**kept["files"], **ran}
        others = {n: s for n, s in kept["tests"].items() if file_of(n) not in ran}
        there = {name: s for name, s in files.items() if (ROOT / name).exists()}
        found = {
            "on": datetime.now(UTC).date().isoformat(),
            "commit": self._commit,
            "workers": self._config.getoption("numprocesses", None) or 1,
            "cores": len(os.sched_getaffinity(0)),
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "whole": exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
            "outcomes": dict(sorted(self.outcomes.items())),
            "files": _rounded(there),
            "tests": _rounded(
                {n: s for n, s in {**others, **tests}.items() if file_of(n) in there}
            ),
        }
        RESULTS.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
        PAGE.write_text(page(found))


def known() -> dict[str, Any]:
    """Return what test-durations.json holds: seconds of `files` and of the longer `tests`."""
    if not RESULTS.exists():
        return {"files": {}, "tests": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def summed(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each file of these tests."""
    files: dict[str, float] = defaultdict(float)
    for name, taken in seconds.items():
        files[file_of(name)] += taken
    return files


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def page(found: Mapping[str, Any]) -> str:
    """Return docs/internals/test-durations.md for what docs/internals/test-durations.json holds."""
    files: dict[str, float] = found["files"]
    levels: dict[str, float] = defaultdict(float)
    for name, seconds in files.items():
        levels[name.split("/")[1]] += seconds
    outcomes = ", ".join(f"{count:,} {what}" for what, count in found["outcomes"].items())
    lines = [
        HEAD,
        f"The last run: {found['on']}, commit {found['commit']}, {outcomes} in {found['minutes']}",
        f"minutes; {found['workers']} workers on {found['cores']} cores."
        + " It was ended before its last test." * (not found["whole"]),
        "",
    ]
    lines += _table("level", {name: s / 60 for name, s in levels.items()}, "minutes", 1)
    lines += _table(f"longest {_SHOWN_FILES} files", files, "seconds", 0, _SHOWN_FILES)
    lines += _table(f"longest {_SHOWN_TESTS} tests", found["tests"], "seconds", 0, _SHOWN_TESTS)
    return "\n".join(lines)


def _table(
    what: str, rows: Mapping[str, float], unit: str, digits: int, most: int | None = None
) -> list[str]:
    longest = sorted(rows.items(), key=lambda row: -row[1])[:most]
    cells = (f"| {name.replace('|', '&#124;')} | {value:.{digits}f} |" for name, value in longest)
    return [f"| {what} | {unit} |", "|---|---|", *cells, ""]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    ordered: Iterable[tuple[str, float]] = sorted(seconds.items())
    return {name: round(taken, 1) for name, taken in ordered}
