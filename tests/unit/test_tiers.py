"""Which tests a tier holds, as pytest runs them and as sources say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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


def chosen(where: Path, tier: str) -> set[str]:
    words = ("--collect-only", "-q", "-p", "no:cacheprovider", "tests", "--tier", tier)
    path = f"{ROOT / 'tests'}:{ROOT / 'devcluster/src'}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=where, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    return {line.removeprefix("tests/").replace("/test_it.py::test_", " ") for line in found}


def test_a_tier_holds_those_before_it_and_sources_say_the_same(tmp_path: Path) -> None:
    sources: dict[str, str] = {}
    marks = {"unit": "", "api": "", "cluster": 'pytestmark = [pytest.mark.tier("all")]'}
    for level, of_file in marks.items():
        file = tmp_path / f"tests/{level}/test_it.py"
        file.parent.mkdir(parents=True)
        file.write_text(MARKED.format(of_file=of_file))
        told = tiers.of_sources(f"tests/{level}/test_it.py", ast.parse(file.read_text()))
        sources |= {f"{level} {name.removeprefix('test_')}": tier for name, tier in told.items()}
    for name in ("tests/conftest.py", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    check = {"unit plain", "unit some[1]"}
    gate = {"api plain", "api some[1]", *check}
    every = {
        f"{level} {test}" for level in marks for test in ("long", "plain", "some[1]", "some[2]")
    }
    for tier, wanted in (("check", check), ("gate", gate), ("all", every)):
        assert chosen(tmp_path, tier) == wanted
    earliest = {name.partition("[")[0]: "gate" for name in gate} | {
        name.partition("[")[0]: "check" for name in check
    }
    assert sources == {
        name.partition("[")[0]: earliest.get(name.partition("[")[0], "all") for name in every
    }
