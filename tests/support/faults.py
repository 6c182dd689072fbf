"""The fault matrix: what can go wrong, what must follow, and which tests show it.

docs/internals/fault-matrix.md holds the rows; a test says `@pytest.mark.fault("O1")`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import tiers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/fault-matrix.md"
_ROW = re.compile(r"^- \*\*([A-Z]\d+)\*\* .+: .+$", re.MULTILINE)
_BEYOND = re.compile(r"^- ([A-Z]\d+): .+$", re.MULTILINE)


def names() -> list[str]:
    """Every row's."""
    return _ROW.findall(PAGE.read_text())


def beyond_the_gate() -> set[str]:
    """Rows that no test of the gate shows; the page has the reasons."""
    return set(_BEYOND.findall(PAGE.read_text()))


@dataclass(frozen=True, slots=True)
class Marked:
    """The rows that a test function shows, and its tier."""

    rows: list[str]
    tier: str


def marked() -> Iterator[tuple[str, Marked]]:
    """Test functions of rows, as the sources say."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name, module = str(file.relative_to(ROOT)), ast.parse(file.read_text())
        tier = tiers.of_sources(name, module)
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and (rows := _rows(node)):
                yield f"{name}::{node.name}", Marked(rows, tier[node.name])


def _rows(function: ast.FunctionDef) -> list[str]:
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    faults = [call for call in calls if getattr(call.func, "attr", "") == "fault"]
    return [argument.value for call in faults for argument in call.args
            if isinstance(argument, ast.Constant)]  # fmt: skip
