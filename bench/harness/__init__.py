"""What every benchmark shares: options, the machine's facts, summaries, a table and JSON."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "trainer/src"))  # when make did not
