"""Snapshots as the loop sees them: restore once, save when due. Rank 0 reads and writes.

Failing to save is no reason to stop training: it is said, counted, and tried again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ddpjob_trainer import failpoints, rng
from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.progress import Progress
from ddpjob_trainer.snapshot.store import Loaded, SnapshotStore
from ddpjob_trainer.state import TrainingState, share
from ddpjob_trainer.world import World, say

Config = Mapping[str, Any]


class Snapshots:
    """One process's view. All methods but due() are called by every rank at the same step."""

    def __init__(self, settings: SnapshotSettings, world: World, progress: Progress) -> None:
        self._settings = settings
        self._world = world
        self._progress = progress
        self._store: SnapshotStore | None = None
        self.newest = -1  # step of the newest snapshot

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        every = self._settings.every_steps if self._settings.directory is not None else None
        return {"snapshots": every is not None, "snapshot_every": every}

    def check(self, state: TrainingState) -> None:
        """Raise ConfigError now for what the first snapshot could not store."""
        if self._settings.directory is None:
            return
        try:
            state.capture([])
        except TypeError as error:
            raise ConfigError(f"no snapshot can be made: {error}") from error

    def restore(self, state: TrainingState, config: Config) -> tuple[int, Config]:
        """Load the newest snapshot; return its step and configuration, or 0 and {}."""
        if self._settings.directory is None:
            return 0, {}
        loaded: Loaded | None = None
        if self._world.rank == 0:
            self._store, loaded = SnapshotStore.open(
                self._settings.directory,
                self._world.identity,
                keep=self._settings.keep,
                resume=self._settings.resume,
                tell=lambda text: say(0, text),
            )
        failpoints.reach("load")
        shared = share(self._world, loaded)
        if shared is None:
            return 0, {}
        _compare(shared.config, config, self._world.rank)
        # Level elastic: all ranks' generators are equal, and there may have been fewer of them.
        state.restore(shared.flat, 0 if config["level"] == "elastic" else self._world.rank)
        self.learn(shared.step + 1)
        if self._world.rank == 0:
            say(0, f"resuming after step {shared.step}")
        return shared.step, shared.config

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a snapshot belongs after this step."""
        if self._settings.directory is None:
            return False
        return last or step % self._settings.every_steps == 0

    def before_update(self) -> None:
        """The parameters are about to change: wait until nothing reads them any more."""

    def report(self) -> float:
        """For a sum over all ranks: the newest durable step plus 1 on rank 0, else 0."""
        return self.newest + 1.0 if self._store is not None else 0.0

    def learn(self, reported: float) -> None:
        """Take in that sum: no rank claims a snapshot that is not yet durable."""
        newest = int(reported) - 1
        if newest > self.newest:
            self.newest = newest
            self._progress.saved(newest)

    def save(self, step: int, state: TrainingState, config: Config) -> None:
        """Commit a snapshot of this step on rank 0; the others go on to the next step."""
        # All ranks capture: a state_dict() may gather what lies on the others.
        captured = state.capture(self._world.gather_bytes(rng.capture()))
        if self._store is None:
            return
        self._progress.phase("snapshot")
        begun = time.perf_counter()
        try:
            self._store.save(step, captured, config)
        except OSError as error:
            self._progress.save_failed()
            newest = f"that of step {self.newest}" if self.newest >= 0 else "none"
            say(
                0,
                f"snapshot after step {step} failed: {error.strerror or error}; training goes"
                f" on, the newest snapshot is {newest}",
            )
        else:
            self.newest = step
            self._progress.saved(step)
            self._progress.save_took(time.perf_counter() - begun)
        self._progress.phase("step")


def _compare(stored: Config, mine: Config, rank: int) -> None:
    """Refuse to continue another run; warn where only bitwise equality is lost."""
    for name, cure in (
        ("seed", "the data order would change"),
        ("global_batch", "the data order would change"),
        ("samples", "the dataset is another one"),
        ("tail", "the data order would change"),
    ):
        if stored.get(name) != mine[name]:
            raise ConfigError(
                f"the snapshot was made with {name}={stored.get(name)}, now it is {mine[name]}:"
                f" {cure}. Use the old value, or start anew with snapshot.resume: Never"
            )
    elastic = mine["level"] == "elastic"
    if elastic and stored.get("shards") not in (None, mine["shards"]):
        raise ConfigError(
            f"the snapshot was made with shards={stored['shards']}, now it is {mine['shards']}: the"
            " result would be another one. Use the old value, or start anew with snapshot.resume:"
            " Never"
        )
    if rank != 0 or mine["level"] == "off":
        return
    exact = ("micro_batches", "precision", "level", "threads", "torch", "device")
    for name in exact if elastic else ("world_size", *exact):
        if stored.get(name) != mine[name]:
            say(
                0,
                f"warning: {name} was {stored.get(name)} and is {mine[name]}: the result will"
                " not equal an undisturbed run's bit for bit",
            )
