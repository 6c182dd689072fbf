"""docs/internals/test-durations.md and the order of files follow from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import durations


def test_the_page_is_written_from_what_is_kept() -> None:
    found = json.loads(durations.RESULTS.read_text())
    assert durations.PAGE.read_text() == durations.page(found), "run `make test-all`"
    assert found["files"]
    assert found["tests"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a", "b"):
        file = tmp_path / f"tests/api/test_{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "docs/internals").mkdir(parents=True)
    monkeypatch.setattr(durations, "ROOT", tmp_path)
    monkeypatch.setattr(durations, "RESULTS", tmp_path / "docs/internals/test-durations.json")
    monkeypatch.setattr(durations, "PAGE", tmp_path / "docs/internals/test-durations.md")
    return tmp_path


def ran(status: int = 0, **seconds: float) -> dict[str, Any]:
    """What is kept after these tests, each of three phases."""
    recorder = durations.Recorder(SimpleNamespace(getoption=lambda *_: 4))  # type: ignore[arg-type]
    for name, taken in seconds.items():
        for when in ("setup", "call", "teardown"):
            nodeid = f"tests/api/test_{name[0]}.py::test_{name}"
            report = SimpleNamespace(nodeid=nodeid, when=when, outcome="passed", duration=taken)
            recorder.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    recorder.pytest_sessionfinish(status)
    found: dict[str, Any] = json.loads(durations.RESULTS.read_text())
    return found


def test_files_that_were_not_run_keep_what_they_had_and_those_that_went_go(kept: Path) -> None:
    ran(a=1.0, b=2.0, c=3.0)
    found = ran(ab=2.0, ax=0.01)
    assert found["files"] == {"tests/api/test_a.py": 6.0, "tests/api/test_b.py": 6.0}
    assert set(found["tests"]) == {"tests/api/test_a.py::test_ab", "tests/api/test_b.py::test_b"}
    assert found["outcomes"] == {"passed": 2}
    page = (kept / "docs/internals/test-durations.md").read_text()
    assert "2 passed" in page
    assert "ended before" not in page
    ran(pytest.ExitCode.INTERRUPTED, a=1.0)
    assert "ended before its last test" in (kept / "docs/internals/test-durations.md").read_text()
    assert "| tests/api/test_b.py::test_b | 6 |" in page
