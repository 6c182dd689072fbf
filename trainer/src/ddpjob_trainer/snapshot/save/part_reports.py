"""Report each rank's durable part of a snapshot to rank 0, over the rendezvous store.

Nothing here waits, and training's collectives are not involved. Reports are sealed: with a forged
one rank 0 would commit a snapshot that nobody can load, and retention would remove the good ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddpjob_trainer.comm.peer_loss import peer_loss
from ddpjob_trainer.comm.sealed import MOST_BYTES, Board

_CURE = "register fewer tensors with per_rank=True"
_KIND = "snapshot"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a rank's part. ``own``: (name, dtype, shape) of what only it has.

    ``fingerprint``: see layout.Structure. ``text`` says why it failed; empty: it is durable.
    """

    rank: int
    bytes: int = 0
    crc32: int = 0
    own: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    fingerprint: int = 0
    text: str = ""


class PartReports:
    """Shared by all ranks of one incarnation. Raises PeerLostError when rank 0 is gone."""

    def __init__(self, board: Board, writers: Sequence[int]) -> None:
        self.board = board
        self.writers = writers
        self._found: dict[int, dict[int, Report]] = {}  # by step and rank, on rank 0

    def post(self, step: int, report: Report) -> None:
        """Tell rank 0. Called once per rank and step."""
        record = json.dumps({one.name: getattr(report, one.name) for one in fields(report)})
        if len(record) > MOST_BYTES:
            why = f"the list of what it holds alone takes {len(record) >> 20} MiB, more than 7:"
            self.post(step, Report(report.rank, text=f"{why} {_CURE}"))
            return
        with peer_loss():
            self.board.post(_KIND, step, report.rank, record.encode())

    def first_missing(self, step: int) -> int:
        """Return a writer that has not reported, -1 when all have, on rank 0."""
        found = self._found.get(step, {})
        with peer_loss():
            missing = (rank for rank in self.writers if rank not in found)
            return next((r for r in missing if self.board.poll(_KIND, step, r) is None), -1)

    def complete(self, step: int) -> list[Report] | None:
        """Return all writers' reports in their order, None while some are missing, on rank 0."""
        found = self._found.setdefault(step, {})
        with peer_loss():
            for rank in self.writers:
                if rank in found:
                    continue
                record = self.board.poll(_KIND, step, rank)
                if record is None:
                    return None
                found[rank] = _report(json.loads(record))
            for rank in self.writers:
                self.board.remove(_KIND, step, rank)
        return list(self._found.pop(step).values())


def _report(record: dict[str, Any]) -> Report:
    own = tuple((name, dtype, tuple(shape)) for name, dtype, shape in record.pop("own"))
    return Report(**record, own=own)
