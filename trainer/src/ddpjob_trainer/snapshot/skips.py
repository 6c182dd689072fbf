"""Why no snapshot is made: one has failed, or older ones are still being written, perhaps to a
volume that is stuck.

Training goes on, and nothing else shows it. A long wait is said once, and again each time it
doubled.
"""

from __future__ import annotations

import time

from ddpjob_trainer.snapshot.keeper.process import GONE
from ddpjob_trainer.snapshot.part_reports import PartReports
from ddpjob_trainer.snapshot.pipeline import Unfinished

_LONG_SECONDS = 60.0  # a wait that is told of


def failed(step: int, why: str, newest: int) -> str:
    """What is said of one that failed. ``newest``: step of the newest there is; -1: of none."""
    if why.endswith(GONE):
        left = "and this run's snapshots may be gone with it"
    else:
        left = f"the newest snapshot is {f'that of step {newest}' if newest >= 0 else 'none'}"
    return f"snapshot after step {step} failed: {why}; training goes on, {left}"


class Skips:
    """On rank 0: what was said since a snapshot was last made."""

    def __init__(self) -> None:
        self._said = 0.0  # of how many seconds

    def over(self) -> None:
        """One can be made again."""
        self._said = 0.0

    def why(self, oldest: Unfinished | None, reports: PartReports) -> str:
        """What there is to say now, which may be nothing. Raises PeerLostError."""
        seconds = time.perf_counter() - oldest.begun if oldest else 0.0
        # Quick steps are ahead of a busy disk by nature.
        if oldest is None or seconds < max(_LONG_SECONDS, 2 * self._said):
            return ""
        self._said = seconds
        # Once the manifest is being written all parts are there.
        rank = 0 if oldest.asked else max(0, reports.first_missing(oldest.step))
        return (
            f"older ones are still being written, that of step {oldest.step} for {seconds:.0f} s by"
            f" rank {rank}. Is its volume slow, or stuck?"
        )
