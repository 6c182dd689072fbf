"""Print what a command found, line by line, so that no text of a volume moves a terminal's cursor.

All that `ddpjob-trainer evidence` and `snapshot` print passes here; a rank's and a launcher's own
words pass telemetry/console.py and launcher/log.py.
"""

from __future__ import annotations

import sys

from ddpjob_contract.text import clean


def show(*lines: str) -> None:
    """Print lines for the one who asked."""
    print("\n".join(map(clean, lines)))


def warn(text: str) -> None:
    """Print one line on what is wrong."""
    print(clean(text), file=sys.stderr)
