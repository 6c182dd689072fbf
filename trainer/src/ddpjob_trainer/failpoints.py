"""Let `ddpjob chaos` have this process signal itself at named places.

The chaos driver arms one point by writing a file; the process that reaches it renames the file,
which only one can, and then sends itself the signal. Costs nothing outside a chaos run. Never
imports torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

#: In the order in which a process reaches them.
POINTS = ("import", "rendezvous", "load", "warm-up", "step", "snapshot", "barrier")
ARMED = "armed"
#: Holds one number, the step after which training waits, so that no kill comes too late.
GATE = "gate"
GATE_BYTES = 8
OPEN = 2**62  # a gate without a wait
NO_RANK = -1

_directory: Path | None = None
_rank = NO_RANK
_armed = ""  # the file's content when hits were last counted
_hits = 0


def configure(directory: Path | None, rank: int) -> None:
    """Watch a directory for armed points; None: none."""
    global _directory, _rank
    _directory, _rank = directory, rank


def fired(directory: Path, number: int) -> tuple[int, float] | None:
    """Return the pid that reached armed point ``number``, and the seconds since the epoch."""
    for path in directory.glob(f"fired-{number}-*"):
        return int(path.name.rpartition("-")[2]), path.stat().st_ctime
    return None


def reach(point: str) -> None:
    """Send this process the signal if the point is armed and hit often enough."""
    global _armed, _hits
    if _directory is None:
        return
    path = _directory / ARMED
    try:
        armed = path.read_text()
        order = json.loads(armed)
    except (FileNotFoundError, ValueError):
        return
    if order["point"] != point or order["rank"] not in (None, _rank):
        return
    _hits = _hits + 1 if armed == _armed else 1
    _armed = armed
    if _hits < order["hits"]:
        return
    try:
        path.rename(_directory / f"fired-{order['number']}-{os.getpid()}")
    except FileNotFoundError:
        return  # another process was first
    os.kill(os.getpid(), order["signal"])
