"""What the studies' pages are made of. Imported before `harness`, which it puts on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "dev/bench"))  # when make did not
