"""metrics.md and the code name the same metrics, and a scrape shows those and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpjob_trainer.liveness.heartbeat import ACTIVITIES
from ddpjob_trainer.telemetry import metric_names

PAGE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
ROW = re.compile(r"^\| `(ddpjob_trainer_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)
SPECS = (*metric_names.WORKER, *metric_names.LAUNCHER)


def test_the_page_has_a_row_for_each_metric_and_no_other():  # type: ignore[no-untyped-def]
    rows = {name: (kind, labels) for name, kind, labels, _, _ in ROW.findall(PAGE)}
    code = {
        spec.exposed: (spec.type, ", ".join(f"`{label}`" for label in spec.labels) or "-")
        for spec in SPECS
    }
    assert rows == code


def test_units_are_those_of_the_name():  # type: ignore[no-untyped-def]
    units = {name: unit for name, _, _, unit, _ in ROW.findall(PAGE)}
    wrong = [
        name for name, unit in units.items()
        if (unit == "seconds") != bool(re.search(r"_seconds(_total)?$", name))
    ]  # fmt: skip
    assert wrong == []
    assert len(units) == len(SPECS)


def test_every_activity_that_is_counted_is_on_the_page():  # type: ignore[no-untyped-def]
    missing = [activity for activity in ACTIVITIES if f"`{activity}`" not in PAGE]
    assert missing == []


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_names_follow_prometheus(spec):  # type: ignore[no-untyped-def]
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", spec.name)
    assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms"))
    assert spec.help.endswith(".")
    assert (spec.type == "histogram") == bool(spec.buckets)
    assert list(spec.buckets) == sorted(spec.buckets)
