"""What every benchmark shares: options, the machine's facts, summaries, a table and JSON."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
for _part in (
    "tests",
    "dev/devcluster/src",
    "contract/src",
    "operator/src",
    "trainer/src",
    "tools/src",
):
    sys.path.insert(0, str(_ROOT / _part))  # when make did not
