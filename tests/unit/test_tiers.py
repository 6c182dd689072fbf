"""Which tests a tier holds, as pytest runs them and as sources say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from support import tiers
from support.cluster import ROOT

MARKED = """
import pytest
{of_file}

def test_plain(): pass

@pytest.mark.tier("all")
def test_long(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.tier("all"))])
def test_some(n): pass
"""
OF_FILE = 'pytestmark = [pytest.mark.tier("all")]'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Three files of the same tests, and this checkout's options."""
    for level, of_file in (("unit", ""), ("api", ""), ("cluster", OF_FILE)):
        file = tmp_path / f"tests/{level}/test_it.py"
        file.parent.mkdir(parents=True)
        file.write_text(MARKED.format(of_file=of_file))
    (tmp_path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return tmp_path


def collect(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
         "tests", *words],
        cwd=where, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin",
             "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'devcluster/src'}"},
    )  # fmt: skip


def chosen(where: Path, *words: str) -> list[str]:
    done = collect(where, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    return sorted(line.removeprefix("tests/").replace("/test_it.py::test_", " ") for line in found)


def test_a_tier_holds_those_before_it(checkout: Path) -> None:
    check = ["unit plain", "unit some[1]"]
    gate = ["api plain", "api some[1]", *check]
    assert chosen(checkout, "--tier", "check") == check
    assert chosen(checkout, "--tier", "gate") == gate
    every = [f"{level} {test}" for level in ("api", "cluster", "unit")
             for test in ("long", "plain", "some[1]", "some[2]")]  # fmt: skip
    assert chosen(checkout, "--tier", "all") == chosen(checkout) == every


def test_sources_say_the_same() -> None:
    def told(level: str, of_file: str = "") -> dict[str, str]:
        return tiers.of_sources(
            f"tests/{level}/test_it.py", ast.parse(MARKED.format(of_file=of_file))
        )

    assert told("unit") == {"test_plain": "check", "test_long": "all", "test_some": "check"}
    assert told("trainer") == {"test_plain": "gate", "test_long": "all", "test_some": "gate"}
    assert set(told("cluster", OF_FILE).values()) == {"all"}


def test_a_tier_that_is_none_is_refused(checkout: Path) -> None:
    file = checkout / "tests/api/test_it.py"
    file.write_text(file.read_text().replace('"all"', '"late"'))
    done = collect(checkout, "--tier", "gate")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_long: a tier is one of check, gate, all" in done.stderr
