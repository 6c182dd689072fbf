"""Stage marks for benchmarks: {t, event, rank, round} lines, appended to one file by all.

Off unless DDPJOB_TRAINER_TRACE names the file. Never imports torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class Trace:
    """``t`` is the machine's monotonic clock in seconds, the same in all its processes."""

    def __init__(self, path: Path | None, rank: int, round_: int) -> None:
        self._rank = rank
        self.round = round_
        self._fd = -1
        if path is not None:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def mark(self, event: str) -> None:
        """Append one line. ``rank`` -1: the launcher itself."""
        if self._fd >= 0:
            line = {"t": time.monotonic(), "event": event, "rank": self._rank, "round": self.round}
            os.write(self._fd, json.dumps(line).encode() + b"\n")
