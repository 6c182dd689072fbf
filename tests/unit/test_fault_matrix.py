"""Each row of the fault matrix has a test: one of the gate, or a reason why not."""

import ast

from support import faults, tiers
from support.durations import file_of


def test_each_row_has_a_test_in_the_gate_or_a_reason_and_each_mark_a_row():
    marks = dict(faults.marked()).values()
    in_gate = {row for mark in marks if mark.tier != tiers.ALL for row in mark.rows}
    names = faults.names()
    assert len(names) == len(set(names)) > 60
    assert {row for mark in marks for row in mark.rows} == set(names)
    assert set(names) - in_gate == faults.beyond_the_gate()


def test_sources_tell_the_tiers_that_pytest_finds(request):
    found: dict[str, str] = {}
    functions = [item for item in request.session.items if not getattr(item, "cls", None)]
    for item in functions:
        name, tier = item.nodeid.partition("[")[0], tiers.of_item(item)
        found[name] = min(found.get(name, tier), tier, key=tiers.TIERS.index)
    told: dict[str, str] = {}
    for file in {file_of(name) for name in found}:
        of_file = tiers.of_sources(file, ast.parse((faults.ROOT / file).read_text()))
        told |= {f"{file}::{name}": tier for name, tier in of_file.items()}
    assert found == {name: told[name] for name in found}
