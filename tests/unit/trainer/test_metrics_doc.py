"""metrics.md and the code name the same metrics, and a scrape shows those and no others."""

import re
from pathlib import Path

from ddpjob_trainer.liveness.heartbeat import ACTIVITIES
from ddpjob_trainer.telemetry import metrics

PAGE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
ROW = re.compile(r"^\| `(ddpjob_trainer_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)
SPECS = (*metrics.WORKER, *metrics.LAUNCHER)


def test_the_page_has_a_row_for_each_metric_and_no_other():
    rows = {name: (kind, labels) for name, kind, labels, _, _ in ROW.findall(PAGE)}
    code = {
        spec.exposed: (spec.type, ", ".join(f"`{label}`" for label in spec.labels) or "-")
        for spec in SPECS
    }
    assert rows == code

    for name, _, _, unit, _ in ROW.findall(PAGE):
        assert (unit == "seconds") == bool(re.search(r"_seconds(_total)?$", name)), name
    assert all(f"`{activity}`" in PAGE for activity in ACTIVITIES)


def test_names_follow_prometheus():
    for spec in SPECS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", spec.name)
        assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms"))
        assert spec.help.endswith(".")
        assert (spec.type == "histogram") == bool(spec.buckets)
        assert list(spec.buckets) == sorted(spec.buckets)
