"""Mark stages for benchmarks and chaos: {t, event, rank, round} lines in a shared file.

Off unless DDPJOB_TRAINER_TRACE names the file. ``t`` is the machine's monotonic clock in seconds,
the same in all its processes. Never imports torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_fd = -1
_rank = -1
_round = 0
_seen: set[str] = set()  # by first()


def configure(path: Path | None, rank: int, round_: int) -> None:
    """Set the file, and the author of marks. ``rank`` -1: the launcher."""
    global _fd, _rank, _round
    _rank, _round = rank, round_
    if path is not None and _fd < 0:
        _fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def mark(event: str, **more: int | str) -> None:
    """Append one line, if anybody wants it."""
    if _fd >= 0:
        line = {"t": time.monotonic(), "event": event, "rank": _rank, "round": _round, **more}
        os.write(_fd, json.dumps(line).encode() + b"\n")


def first(event: str) -> None:
    """Mark what a process does again and again when it happens for the first time."""
    if event not in _seen:
        _seen.add(event)
        mark(event)


def workers(path: Path) -> dict[int, int]:
    """Return rank -> pid of the newest process that a launcher has started for it."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    marks = (json.loads(line) for line in lines if '"worker"' in line)
    return {mark["rank"]: mark["pid"] for mark in marks}
