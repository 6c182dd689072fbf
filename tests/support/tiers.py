"""Tell the tier of a test: of `make check`, of the gate `make test`, or of `make test-all`.

tests/conftest.py deselects by `--tier`; the fault matrix shows each test's tier. A tier holds those
before it. The folder of a test names its tier, unless `@pytest.mark.tier("all")` on the test, on a
parameter or, as `pytestmark`, on the file names another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pytest

CHECK: Final = "check"
GATE: Final = "gate"
ALL: Final = "all"
TIERS: Final = (CHECK, GATE, ALL)
#: Tests of other folders belong to the gate.
OF_FOLDERS: Final[Mapping[str, str]] = {"unit": CHECK, "model": CHECK, "chart": CHECK}


def of_folder(path: str) -> str:
    """Return the tier of tests in ``path``, such as tests/api/test_plans.py, that name none."""
    return OF_FOLDERS.get(path.split("/")[1], GATE)


def of_item(item: pytest.Item) -> str:
    """Return the tier of a test; UsageError where its mark names none of TIERS."""
    mark = item.get_closest_marker("tier")
    if mark is None:
        return of_folder(item.nodeid)
    if len(mark.args) != 1 or mark.args[0] not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: a tier is one of {', '.join(TIERS)}: {mark}")
    return str(mark.args[0])


def some_in_gate(values: Iterable[Any], *gate: object) -> list[Any]:
    """Return parameters of a test: ``gate`` for the gate, the others for `make test-all`."""
    values = list(values)
    assert gate, "the whole test is marked then"
    assert all(one in values for one in gate), f"{gate} are not among {values}"
    later = pytest.mark.tier(ALL)
    return [one if one in gate else pytest.param(one, marks=later) for one in values]


def select(config: pytest.Config, items: list[pytest.Item], tier: str) -> None:
    """Deselect the tests of later tiers than ``tier``."""
    wanted = TIERS[: TIERS.index(tier) + 1]
    left = [item for item in items if of_item(item) not in wanted]
    if left:
        items[:] = [item for item in items if of_item(item) in wanted]
        config.hook.pytest_deselected(items=left)


def of_sources(path: str, module: ast.Module) -> dict[str, str]:
    """Return the tier of each test function of a file, as its source says.

    A function whose parameters differ has the earliest tier of any of them: that of its own mark.
    """
    of_file = of_folder(path)
    for node in module.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytestmark":
            of_file = _marked(ast.walk(node.value)) or of_file
    return {
        node.name: _marked(node.decorator_list) or of_file
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _marked(nodes: object) -> str | None:
    """Return the tier that one of these syntax nodes, `pytest.mark.tier(...)`, names."""
    assert hasattr(nodes, "__iter__")
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "tier":
            (argument,) = node.args
            assert isinstance(argument, ast.Constant), "a tier is named where the mark stands"
            return str(argument.value)
    return None
