"""Write the event log: one JSON object per line, keyed by step, for programs.

Rank 0 writes training events, the launcher adds failures. Each line is one write to a file opened
for appending, so a kill tears at most the line being written, and two writers never mix their
lines. After a resume steps recur. Never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ddpjob_trainer.errors import ConfigError

_LONGEST_LINE: Final = 1 << 20


def exact(value: float) -> float | str:
    """Return a value for JSON that reads back bit for bit.

    JSON has no NaN and no infinity; these become "nan", "inf" and "-inf", as float() reads them.
    """
    return value if math.isfinite(value) else str(value)


class EventLog:
    """Appends to a file. A failing disk ends the log, and training goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the event log {path} cannot be written: {error.strerror}; give another file with"
                " ddp.Logging(events=...), --events or DDPJOB_TRAINER_EVENTS"
            ) from error

    def write(self, event: str, **fields: Any) -> str:
        """Append one line; return the problem, "" if none."""
        if self._fd < 0:
            return ""
        record = {"event": event, "time": round(time.time(), 3), **fields}
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        try:
            os.write(self._fd, line.encode())
        except OSError as error:
            os.close(self._fd)
            self._fd = -1
            return f"the event log {self._path} ends here: {error.strerror}"
        return ""


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without its end, left by a killed writer."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, end - _LONGEST_LINE))
        whole = start + file.read(end - start).rfind(b"\n") + 1
        if whole < end:
            file.truncate(whole)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every event in the order of the file; skip a torn last line."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def read_losses(path: Path) -> dict[int, float]:
    """Return the loss of every finished step, exactly; of equal steps the last line counts."""
    steps = (event for event in read_events(path) if event.get("event") == "step")
    return {int(event["step"]): float(event["loss"]) for event in steps}
