"""Which ranks have made their part of which snapshot durable, told over the rendezvous store.

Nothing here waits, and training's collectives are not involved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from ddpjob_trainer.comm.world import peer_loss


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a rank's part. ``own``: (name, dtype, shape) of what only it has.

    ``fingerprint``: see saving.Structure. ``text`` says why it failed; empty: it is durable.
    """

    rank: int
    bytes: int = 0
    crc32: int = 0
    own: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    fingerprint: int = 0
    text: str = ""


class PartReports:
    """Shared by all ranks of one incarnation. Raises PeerLostError when rank 0 is gone."""

    def __init__(self, store: Store, writers: Sequence[int]) -> None:
        self._store = store
        self._writers = writers

    def post(self, step: int, report: Report) -> None:
        """Tell rank 0. Called once per rank and step."""
        with peer_loss():
            self._store.set(f"snapshot/{step}/{report.rank}", json.dumps(asdict(report)))
            self._store.add(f"snapshot/{step}", 1)

    def complete(self, step: int) -> list[Report] | None:
        """On rank 0: the reports of all writers, in their order; None while some are missing."""
        with peer_loss():
            if self._store.add(f"snapshot/{step}", 0) < len(self._writers):
                return None
            keys = [f"snapshot/{step}/{rank}" for rank in self._writers]
            found = [json.loads(self._store.get(key)) for key in keys]
            for key in (*keys, f"snapshot/{step}"):
                self._store.delete_key(key)
        return [_report(record) for record in found]


def _report(record: dict[str, Any]) -> Report:
    own = tuple((name, dtype, tuple(shape)) for name, dtype, shape in record.pop("own"))
    return Report(**record, own=own)
