"""What a worker tells its launcher: one small file per rank that outlives the worker.

The worker overwrites one fixed-size block with a single pwrite per step (a few microseconds,
no rename), so a SIGKILL at any instant leaves the last whole record. The launcher reads it for
/state and for the termination report. Never imports torch.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

BLOCK = 1024
_MAX_EXCEPTION = 400

Phase = Literal["startup", "step", "snapshot", "done"]


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's progress. ``step`` counts finished steps; ``snapshot_step`` -1: none yet."""

    rank: int
    phase: Phase = "startup"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    snapshot_step: int = -1
    exception: str = ""
    updated_at: float = 0.0  # seconds since the epoch


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


class RankStateWriter:
    """Held by a worker. Without a directory (no launcher) it writes nothing."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self.state = RankState(rank)
        self._fd = -1
        if directory is not None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(_path(directory, rank), flags, 0o600)
        self.update()

    def update(self, **changes: Any) -> None:
        """Change some fields of RankState and publish the record."""
        self.state = replace(self.state, **changes, updated_at=time.time())
        if self._fd < 0:
            return
        record = asdict(self.state)
        data = _encode(record)
        if len(data) >= BLOCK:  # quotes and control characters grow when escaped
            record["exception"] = self.state.exception[: _MAX_EXCEPTION // 8]
            data = _encode(record)
        os.pwrite(self._fd, data[: BLOCK - 1].ljust(BLOCK - 1) + b"\n", 0)

    def failed(self, exception: BaseException) -> None:
        """Record why this process ends."""
        text = f"{type(exception).__name__}: {exception}".splitlines()[0]
        cut = text.encode(errors="replace")[:_MAX_EXCEPTION].decode(errors="ignore")
        self.update(exception=cut)


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def read_state(directory: Path, rank: int) -> RankState | None:
    """Return the last record of a rank, or None when it never wrote one."""
    try:
        data = _path(directory, rank).read_bytes()[:BLOCK]
        return RankState(**json.loads(data))
    except (OSError, ValueError, TypeError):
        return None
