"""Each row of the fault matrix has a test: one of the gate, or a reason why not."""

from __future__ import annotations

from support import faults, tiers


def test_each_row_has_a_test_in_the_gate_or_a_reason_and_each_mark_a_row() -> None:
    marks = dict(faults.marked()).values()
    shown = {row for mark in marks for row in mark.rows}
    in_gate = {row for mark in marks if mark.tier != tiers.ALL for row in mark.rows}
    assert shown == faults.names()
    assert faults.names() - in_gate == faults.BEYOND_THE_GATE.keys()
    assert all(faults.BEYOND_THE_GATE.values())
