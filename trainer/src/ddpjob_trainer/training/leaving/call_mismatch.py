"""Refuse a run whose ranks make different calls, or leave the loop in different places.

A rank that makes another call than the rest cannot say so by a collective: the others wait in
another one, for gradients say. So a rank that gets no further writes its last calls into the store,
from a thread, and compares them with those that another rank has written.
"""

from __future__ import annotations

import threading

from ddpjob_trainer.comm.sealed import Board
from ddpjob_trainer.comm.world import World, other_call
from ddpjob_trainer.training.leaving.shutdown import Shutdown

_FIRST_LOOK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 8.0


class CallMismatch:
    """One process's side of comparing the ranks' calls. Does nothing in a run of one rank."""

    def __init__(self, world: World, shutdown: Shutdown) -> None:
        self._world = world
        self._shutdown = shutdown
        self._over = threading.Event()
        if world.size > 1:
            threading.Thread(target=self._watch, name="call mismatch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        pause, before = _FIRST_LOOK_SECONDS, -1
        while not self._over.wait(pause):
            reached, board = self._shutdown.reached, self._world.board
            if reached != before:
                pause, before = _FIRST_LOOK_SECONDS, reached
                continue
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            try:
                if board is not None:
                    self._look(board)
            except RuntimeError:  # the store is gone; the main thread hears of it too
                return

    def _look(self, board: Board) -> None:
        """End this process if another makes other calls: one waits for what will not come."""
        rank = self._world.rank
        for number, what in list(self._shutdown.calls):
            other, data = board.first("call", number, rank, what.encode())
            if (there := data.decode()) != what:
                error = other_call((other, there), (rank, what))
                self._shutdown.refuse(board.refusal(str(error)))
