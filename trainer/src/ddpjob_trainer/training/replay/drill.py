"""Make a drill: one planned restart in place soon after the start checks resuming early.

All ranks end after the same step and say so to their launchers; the hub, which takes that for no
failure (launcher/hub/rounds.py), has the next round begin. A long run has two: after its first
durable snapshot, and after the first one that holds an epoch's end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from ddpjob_trainer.environment import DrillSettings, Identity
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.training.replay.replay import Replay

#: Auto leaves the drill out where the start took longer, for the next one would as well.
SLOW_SECONDS: Final = 60.0
#: Steps after a snapshot before a drill: these are done again.
STEPS: Final = 2


class Drill:
    """One process's side of the drills. Every rank makes the same calls."""

    def __init__(
        self, given: DrillSettings, identity: Identity, replay: Replay, snapshots: SnapshotManager
    ) -> None:
        self._given = given
        self._first = (identity.attempt, identity.round) == (1, 0)
        self._replay = replay
        self._snapshots = snapshots
        # A shell or a torchrun between us would take the end of this process for its own affair.
        self._ours = given.mode != "Never" and given.launcher == os.getppid()
        self._slow: bool | None = None  # known in the first step
        self._allowed = False  # by every rank
        self._goal = 0  # a durable snapshot of this step or a later one; 0: no drill
        self._total = 0

    def begin(self, done: int, *, epoch: int | None, total: int, rescued: bool = False) -> None:
        """Choose what to wait for. ``done``: steps before; ``epoch``: its steps, if it has an end.

        Who resumes a snapshot in the midst of a job is checked by that restart itself, but for one
        that was ``rescued``: then no step is done again.
        """
        self._total = total
        if self._first or rescued or not done:
            self._goal = done + 1
        elif epoch is not None and done < epoch:
            self._goal = epoch

    def report(self) -> list[float]:
        """Return numbers to add up over all ranks: drill impossible here; slow start here."""
        if self._slow is None:
            took = time.monotonic() - self._given.begun
            self._slow = self._given.mode == "Auto" and took > SLOW_SECONDS
        return [float(not (self._ours and self._replay.records)), float(self._slow)]

    def learn(self, sums: Sequence[float]) -> None:
        """Take in the sums of report()."""
        cannot, slow = sums
        self._allowed = not cannot and not slow
        if not cannot and slow and self._goal:
            self._goal = 0
            self._replay.tell_unchecked(
                f"no drill: on {slow:.0f} ranks the first step took more than {SLOW_SECONDS:.0f} s"
                " from the start, and a drill would take as long. One is made all the same with"
                " restart.inPlace.drill: Always, or DDPJOB_DRILL=Always"
            )

    def is_due(self, step: int) -> bool:
        """Tell whether all ranks end now, after this step. It is the same on all of them.

        Not while another restart is still compared, nor when no snapshot but the last follows.
        """
        every = self._snapshots.every_steps
        return (
            self._allowed
            and not self._replay.compares
            and 0 < self._goal <= self._snapshots.newest
            and step % every >= STEPS
            and self._total - step >= every
        )
