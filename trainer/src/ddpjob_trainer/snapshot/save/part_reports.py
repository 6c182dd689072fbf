"""Report each rank's durable part of a snapshot to rank 0, over the rendezvous store.

Nothing here waits, and training's collectives are not involved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch._C._distributed_c10d import Store

from ddpjob_trainer.comm.peer_loss import peer_loss

#: torch's store closes the connection of who sends it more than 8 MiB at once.
_MAX_BYTES = 7 << 20
_CURE = "keep series of numbers in tensors, or have fewer parameters in each rank's part"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a rank's part. ``own``: (name, dtype, shape) of what only it has.

    ``parts``: its entries of each optimizer that is divided among the ranks, as JSON.
    ``fingerprint``: see layout.Structure. ``text`` says why it failed; empty: it is durable.
    """

    rank: int
    bytes: int = 0
    crc32: int = 0
    own: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    fingerprint: int = 0
    text: str = ""
    parts: Mapping[str, list[Any]] = field(default_factory=dict)


class PartReports:
    """Shared by all ranks of one incarnation. Raises PeerLostError when rank 0 is gone."""

    def __init__(self, store: Store, writers: Sequence[int]) -> None:
        self._store = store
        self.writers = writers

    def post(self, step: int, report: Report) -> None:
        """Tell rank 0. Called once per rank and step."""
        record = json.dumps({one.name: getattr(report, one.name) for one in fields(report)})
        if len(record) > _MAX_BYTES:
            why = f"the list of what it holds alone takes {len(record) >> 20} MiB, more than 7:"
            self.post(step, Report(report.rank, text=f"{why} {_CURE}"))
            return
        with peer_loss():
            self._store.set(f"snapshot/{step}/{report.rank}", record)
            self._store.add(f"snapshot/{step}", 1)

    def first_missing(self, step: int) -> int:
        """Return a writer that has not reported, -1 when all have, on rank 0."""
        with peer_loss():
            told = (self._store.check([f"snapshot/{step}/{rank}"]) for rank in self.writers)
            return next((r for r, one in zip(self.writers, told, strict=True) if not one), -1)

    def complete(self, step: int) -> list[Report] | None:
        """Return all writers' reports in their order, None while some are missing, on rank 0."""
        with peer_loss():
            if self._store.add(f"snapshot/{step}", 0) < len(self.writers):
                return None
            keys = [f"snapshot/{step}/{rank}" for rank in self.writers]
            found = [json.loads(self._store.get(key)) for key in keys]
            for key in (*keys, f"snapshot/{step}"):
                self._store.delete_key(key)
        return [_report(record) for record in found]


def _report(record: dict[str, Any]) -> Report:
    own = tuple((name, dtype, tuple(shape)) for name, dtype, shape in record.pop("own"))
    return Report(**record, own=own)
