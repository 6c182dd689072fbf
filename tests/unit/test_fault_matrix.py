"""docs/internals/fault-matrix.md tells of the tests that there are, and of how they ended."""

from __future__ import annotations

import json

from support import faults, tiers

CURE = "run `make fault-matrix`, or one of its tests with --fault-matrix"


def test_each_mark_names_a_row() -> None:
    marks = dict(faults.marked())
    assert marks
    assert {row for mark in marks.values() for row in mark.rows} <= faults.names()


def test_each_row_has_a_test_in_the_gate_or_a_reason() -> None:
    marks = dict(faults.marked()).values()
    shown = {row for mark in marks for row in mark.rows}
    in_gate = {row for mark in marks if mark.tier != tiers.ALL for row in mark.rows}
    assert shown == faults.names()
    assert faults.names() - in_gate == faults.BEYOND_THE_GATE.keys()
    assert all(faults.BEYOND_THE_GATE.values())


def test_no_test_that_is_told_of_failed() -> None:
    results = json.loads(faults.RESULTS.read_text())
    assert results
    assert [function for function, found in results.items() if found["failed"]] == []


def test_the_page_is_written_from_these_tests_and_results() -> None:
    results = json.loads(faults.RESULTS.read_text())
    assert faults.PAGE.read_text() == faults.page(results, dict(faults.marked())), CURE
