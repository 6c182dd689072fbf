"""Refuse a run whose ranks make different calls, or leave the loop in different places.

A rank that makes another call than the rest cannot say so by a collective: the others wait in
another one, for gradients say. So a rank that waits and gets no further writes its last calls into
the store, from a thread, and compares them with those that another rank has written.
"""

from __future__ import annotations

import json
import threading

from torch._C._distributed_c10d import Store

from ddpjob_trainer.comm.world import World, other_call
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.training.leaving.shutdown import Shutdown

#: How the call begins that a rank makes which leaves the loop early.
LEFT = "left the loop"
_FIRST_LOOK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 8.0


class CallMismatch:
    """One process's side. Does nothing in a run of one rank."""

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
            reached, store = self._shutdown.reached, self._world.store
            if reached != before:
                pause, before = _FIRST_LOOK_SECONDS, reached
                continue
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            try:
                if store is not None and self._shutdown.waits:
                    self._look(store)
            except RuntimeError:  # the store is gone; the main thread hears of it too
                return

    def _look(self, store: Store) -> None:
        """End this process if it waits for what will not come."""
        rank = self._world.rank
        for number, what in list(self._shutdown.calls):
            mine = json.dumps([rank, what])
            other, there = json.loads(store.compare_set(f"call {number}", "", mine))
            if there != what:
                self._shutdown.refuse(_refusal((other, there), (rank, what)))


def meet(world: World, place: str) -> None:
    """Wait for the ranks to leave the loop. Raises ConfigError unless all do in the same place."""
    world.barrier()
    there = [one.decode() for one in world.gather_bytes("the loop's end", place.encode())]
    for rank, other in enumerate(there):
        if other != there[0]:
            raise _refusal((0, there[0]), (rank, other))


def _refusal(first: tuple[int, str], second: tuple[int, str]) -> ConfigError:
    if not second[1].startswith(LEFT):
        first, second = second, first
    if not second[1].startswith(LEFT):
        return other_call(second, first)
    there = first[1] if first[1].startswith(LEFT) else f"is in {first[1]}"
    return ConfigError(
        f"rank {second[0]} {second[1]}, and rank {first[0]} {there}: leave it on every rank in the"
        " same step, or on none. run.sum(flag) tells all ranks what one has seen, and step.stop()"
        " ends the loop on all of them. An error that one rank's script catches: let it go up, and"
        " all ranks restart"
    )
