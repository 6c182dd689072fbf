"""All ranks leave the loop in the same place, or the run is refused: none waits for one that left.

Who has left cannot tell by a collective, for the others may stand in another one, gradients say,
and wait for it. So it writes where it left into the store. A rank that gets no further reads it
there, from a thread: one that has gone on past that place would wait for ever.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from ddpjob_trainer.comm.world import World, peer_loss
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.training.shutdown import Shutdown
from ddpjob_trainer.training.step import Step

_KEY = "left the loop"  # where the first one did
_FIRST_LOOK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 8.0


class Parting:
    """One process's side. Does nothing in a run of one rank."""

    def __init__(self, world: World, shutdown: Shutdown) -> None:
        self._world = world
        self._shutdown = shutdown
        self._over = threading.Event()
        if world.size == 1:
            self._over.set()

    def watch(self) -> None:
        """Look for ranks that left, whenever this one gets no further. Until close()."""
        if not self._over.is_set():
            threading.Thread(target=self._watch, name="parting", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def leave(self, step: Step | None) -> None:
        """Wait until every rank has left the loop where this one has, in this step.

        Raises ConfigError, PeerLostError.
        """
        world = self._world
        if self._over.is_set() or world.store is None or world.control is None:
            return
        self._over.set()
        place = "before its first step"
        if step is not None:
            place = f"in step {step.index}, {'after' if step.committed else 'before'} its commit()"
        here = {"rank": world.rank, "place": place, "reached": self._shutdown.peers.reached}
        with self._shutdown.listening, peer_loss():
            first = json.loads(world.store.compare_set(_KEY, "", json.dumps(here)))
            if first["place"] != place:
                raise _refusal(first, f"rank {world.rank} left it {place}")
            # gloo takes it for no part of another collective, in which the others may stand.
            world.control.barrier().wait()

    def _watch(self) -> None:
        pause, before = _FIRST_LOOK_SECONDS, -1
        while not self._over.wait(pause):
            reached, store = self._shutdown.peers.reached, self._world.store
            if reached != before:
                pause, before = _FIRST_LOOK_SECONDS, reached
                continue
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            try:
                if store is None or not store.check([_KEY]):
                    continue
                first = json.loads(store.get(_KEY))
            except RuntimeError:  # the store is gone; the main thread hears of it too
                return
            if first["reached"] < reached and not self._over.is_set():
                self._shutdown.refuse(_refusal(first, "others went on"))


def _refusal(first: dict[str, Any], others: str) -> ConfigError:
    return ConfigError(
        f"rank {first['rank']} left the loop {first['place']}, and {others}: leave it on every rank"
        " in the same step, or on none. run.sum(flag) tells all ranks what one has seen"
    )
