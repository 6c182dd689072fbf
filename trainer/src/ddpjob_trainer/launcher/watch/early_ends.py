"""Warn of ranks that ended with 0 long ago while others run on.

That is no failure, yet the others may wait for ever. Ranks in a collective notice: it fails, or
hangs until hangs.py acts; this warning is for all others. The supervisor's loop asks; every
launcher names its own ranks, that of replica 0 also those that the hub knows of.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpjob_trainer.launcher.hub.root_cause import Exit, whom
from ddpjob_trainer.launcher.worker_group import WorkerGroup


class EarlyEnds:
    """``patience``: seconds in which others may end as well. ``say`` warns once a round."""

    def __init__(self, patience: float, say: Callable[[str], None]) -> None:
        self._patience = patience
        self._say = say
        self._told = False

    def begin(self) -> None:
        """Start over with a round."""
        self._told = False

    def poll(self, workers: WorkerGroup, others: tuple[list[Exit], int], now: float) -> None:
        """Warn when it is due. ``others``: ends with 0 elsewhere, and how many ranks run there."""
        running = workers.running + others[1]
        if self._told or workers.stopping or not running:
            return
        ends = [one for one in (*workers.exits, *others[0]) if one.status == 0]
        # After the loop nobody waits for a rank: one may write for long what all have trained.
        early = [one for one in ends if now - one.at >= self._patience and not one.done]
        if not early:
            return
        self._told = True
        self._say(
            f"{whom(early)} ended with exit code 0 more than {self._patience:g} s ago, and"
            f" {running} of the others have not ended and may wait for it for ever"
            " (sys.exit() on some ranks only?)"
        )
