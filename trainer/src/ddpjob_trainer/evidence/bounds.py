"""Cut evidence to its bounds: a round of any gang has some megabytes at most. Pure.

The launcher's reports/evidence calls it with what it has collected; writer.py encodes the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ddpjob_contract.evidence import Evidence

#: Bytes of a rank's last lines, in JSON: of one that failed, and of others as many as there are.
MOST_LOG: Final = 32 << 10
_LEAST_LOG: Final = 2 << 10
_LOGS_OF_ROUND: Final = 8 << 20
_LOGS_OF_FILE: Final = 256 << 10
MOST_STACKS: Final = 64 << 10
MOST_FILE: Final = 1 << 20
#: Bytes of the copies of NCCL's flight recorder: of a rank, and of all.
_MOST_FLIGHT: Final = 1 << 20
_FLIGHT_OF_ROUND: Final = 32 << 20


def log_share(world_size: int, nproc: int) -> int:
    """Return the bytes of log that a rank may keep that did not fail."""
    return max(_LEAST_LOG, min(MOST_LOG, _LOGS_OF_ROUND // world_size, _LOGS_OF_FILE // nproc))


def flight_share(world_size: int) -> int:
    """Return the bytes of flight recorder, compressed, that a rank may keep."""
    return min(_MOST_FLIGHT, _FLIGHT_OF_ROUND // world_size)


def newest(lines: Sequence[str], most: int) -> list[str]:
    """Return the last lines that fit into so many bytes of JSON."""
    kept: list[str] = []
    for line in reversed(lines):
        most -= len(json.dumps(line)) + 1
        if most < 0:
            break
        kept.append(line)
    return kept[::-1]


def encode(body: Evidence) -> bytes:
    """Encode a file; drop logs of ranks that did not fail, then all, should it be too large."""
    data = json.dumps(body, separators=(",", ":")).encode()
    for kept in (("failed",), ()):
        if len(data) <= MOST_FILE:
            break
        body = body.copy()
        body["ranks"] = [
            one if one["end"] in kept else {k: v for k, v in one.items() if k != "log"}  # type: ignore[misc]
            for one in body["ranks"]
        ]
        data = json.dumps(body, separators=(",", ":")).encode()
    return data
