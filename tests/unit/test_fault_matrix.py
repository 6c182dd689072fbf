"""Each row of the fault matrix has a test: one of the gate, or a reason why not."""

from __future__ import annotations

from support import faults, tiers


def test_each_row_has_a_test_in_the_gate_or_a_reason_and_each_mark_a_row() -> None:
    marks = dict(faults.marked()).values()
    in_gate = {row for mark in marks if mark.tier != tiers.ALL for row in mark.rows}
    names = faults.names()
    assert len(names) == len(set(names)) > 60
    assert {row for mark in marks for row in mark.rows} == set(names)
    assert set(names) - in_gate == faults.beyond_the_gate()
