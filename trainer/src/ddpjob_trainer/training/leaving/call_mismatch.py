"""Refuse a run whose ranks make different calls, or leave the loop in different places.

A rank that makes another call than the rest cannot say so by a collective: the others wait in
another one, for gradients say. So each rank writes its place into the store. A rank that makes no
progress looks there, from a thread, for one that has left the loop or is in another call.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from torch._C._distributed_c10d import Store

from ddpjob_trainer.comm.peer_loss import peer_loss
from ddpjob_trainer.comm.world import World, other_call
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.training.leaving.shutdown import Shutdown, named
from ddpjob_trainer.training.step import Step

_KEY = "left the loop"  # where the first one did
_FIRST_LOOK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 8.0


class CallMismatch:
    """One process's side. Does nothing in a run of one rank."""

    def __init__(self, world: World, shutdown: Shutdown) -> None:
        self._world = world
        self._shutdown = shutdown
        self._over = threading.Event()
        if world.size == 1:
            self._over.set()

    def watch(self) -> None:
        """Look for the others, whenever this one gets no further. Until close()."""
        if not self._over.is_set():
            threading.Thread(target=self._watch, name="call mismatch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def leave(self, step: Step | None, *, entered: bool = True) -> None:
        """Wait until every rank has left the loop where this one has, in this step.

        ``entered``: whether it was ever in the loop. Raises ConfigError, PeerLostError.
        """
        world, caught = self._world, self._shutdown.caught
        if self._over.is_set() or world.store is None or world.control is None:
            return
        self._over.set()
        place = "before its first step" if entered else "before it began"
        if step is not None:
            place = f"in step {step.index}, {'after' if step.committed else 'before'} its commit()"
        here = {"rank": world.rank, "place": place, "reached": self._shutdown.peers.reached}
        here["caught"] = named(caught) if caught is not None else ""
        with self._shutdown.listening, peer_loss():
            first = json.loads(world.store.compare_set(_KEY, "", json.dumps(here)))
            if first["place"] != place:
                raise _apart(first, f"rank {world.rank} left it {place}")
            # gloo takes it for no part of another collective, in which the others may stand.
            world.control.barrier().wait()

    def _watch(self) -> None:
        pause, before = _FIRST_LOOK_SECONDS, -1
        peers = self._shutdown.peers
        while not self._over.wait(pause):
            reached, store = peers.reached, self._world.store
            if reached != before:
                pause, before = _FIRST_LOOK_SECONDS, reached
                continue
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            try:
                if store is not None:
                    self._look(store, reached)
            except RuntimeError:  # the store is gone; the main thread hears of it too
                return

    def _look(self, store: Store, reached: int) -> None:
        """End this process if it waits for what will not come."""
        if store.check([_KEY]):
            first = json.loads(store.get(_KEY))
            if first["reached"] < reached and not self._over.is_set():
                self._end(first)
        if not self._shutdown.peers.depth:
            return
        rank = self._world.rank
        for number, what in list(self._shutdown.peers.calls):
            mine = json.dumps([rank, what])
            other, there = json.loads(store.compare_set(f"call {number}", "", mine))
            if there != what:
                self._shutdown.refuse(other_call((other, there), (rank, what)))

    def _end(self, first: dict[str, Any]) -> None:
        error = _apart(first, "others went on")
        if isinstance(error, ConfigError):
            self._shutdown.refuse(error)
        self._shutdown.if_peer_lost(error)


def _apart(first: dict[str, Any], others: str) -> ConfigError | PeerLostError:
    """Choose what the others end by: after an error another try may help, after a break not."""
    if not first["caught"]:
        return _refusal(first, others)
    left = f"rank {first['rank']} left the loop {first['place']}"
    return PeerLostError(f"{left}, with {first['caught']}")


def _refusal(first: dict[str, Any], others: str) -> ConfigError:
    return ConfigError(
        f"rank {first['rank']} left the loop {first['place']}, and {others}: leave it on every rank"
        " in the same step, or on none. run.sum(flag) tells all ranks what one has seen, and"
        " step.stop() ends the loop on all of them. An error that one rank's script catches: let it"
        " go up, and all ranks restart"
    )
