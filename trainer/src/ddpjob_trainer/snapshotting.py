"""Snapshots as the loop sees them: restore once, save when due.

Every rank stages its part and trains on; keepers write. Failing to save is no reason to stop
training: it is said, counted, and tried again.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddpjob_trainer import failpoints
from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.progress import Progress
from ddpjob_trainer.restoring import Opened, open_together
from ddpjob_trainer.snapshot.board import Board
from ddpjob_trainer.snapshot.format import DTYPES, UnstorableError
from ddpjob_trainer.snapshot.keeping import END_SECONDS
from ddpjob_trainer.snapshot.saving import Captured, Image, Shares, assembler, lay_out, measure
from ddpjob_trainer.snapshot.staging import Buffer, Copy, mark
from ddpjob_trainer.snapshot.tracking import Assemble, Part, Place, Tracker
from ddpjob_trainer.snapshot.writing import data_name
from ddpjob_trainer.state import TrainingState
from ddpjob_trainer.world import World, say

Config = Mapping[str, Any]
_FAILING_SECONDS = 0.5
_SLACK_BYTES = 64 << 10  # numbers in a header get longer


class Snapshots:
    """One process's view. Every rank calls the same methods at the same step."""

    def __init__(self, settings: SnapshotSettings, world: World, progress: Progress) -> None:
        self._settings = settings
        self._world = world
        self._progress = progress
        self._later = settings.staging == "thread" or (
            settings.staging == "auto" and world.device.type == "cuda"
        )
        self._tracker: Tracker | None = None
        self._hook: RemovableHandle | None = None
        self._place: Place | None = None
        self._unsettled = False
        self._skipping = False
        self._free = True  # every rank has a buffer to save into
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
            state.capture(self._world.rank).check()
        except (UnstorableError, ValueError) as error:
            raise ConfigError(f"no snapshot can be made: {error}") from error

    # --- Restore -------------------------------------------------------------------------

    def restore(self, state: TrainingState, config: Config) -> tuple[int, Config]:
        """Load the newest snapshot; return its step and configuration, or 0 and {}."""
        if self._settings.directory is None:
            return 0, {}
        opened = open_together(
            self._settings.directory,
            self._settings,
            self._world,
            tell=lambda text: say(self._world.rank, text),
        )
        failpoints.reach("load")
        self._open(opened)
        loaded = opened.loaded
        if loaded is None:
            return 0, {}
        _compare(loaded.config, config, self._world.rank)
        # Level elastic: all ranks' generators are equal, and there may have been fewer of them.
        state.restore(loaded.flat, 0 if config["level"] == "elastic" else self._world.rank)
        self.learn([loaded.step + 1, 0])
        if self._world.rank == 0:
            say(0, f"resuming after step {loaded.step}")
        return loaded.step, loaded.config

    def _open(self, opened: Opened) -> None:
        assert self._settings.directory is not None
        nonce = self._world.broadcast_bytes(secrets.token_hex(4).encode()).decode()
        self._place = Place(
            self._settings.directory,
            opened.start.sequence,
            nonce,
            self._settings.keep,
            opened.writers,
        )

    # --- Save ----------------------------------------------------------------------------

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a snapshot belongs after this step."""
        if self._settings.directory is None:
            return False
        return last or step % self._settings.every_steps == 0

    def report(self) -> list[float]:
        """Two numbers to add up over all ranks, before each save() at least.

        The newest durable step plus 1, by rank 0; whether this rank has no buffer to save into.
        """
        self._hear()
        tracker = self._tracker
        full = tracker is not None and not tracker.broken and not tracker.pool.free()
        return [self.newest + 1.0 if self._world.rank == 0 else 0.0, float(full)]

    def learn(self, reported: Sequence[float]) -> None:
        """Take in the sums of report(): no rank claims a snapshot that is not yet durable."""
        newest = int(reported[0]) - 1
        self._free = not reported[1]
        if newest > self.newest:
            self.newest = newest
            self._progress.saved(newest)

    def before_update(self) -> None:
        """Wait until the snapshot of the step before has read the parameters."""
        if self._tracker is not None:
            self._tracker.wait_copied()

    def save(self, step: int, state: TrainingState, config: Config, *, last: bool) -> None:
        """Stage a snapshot of this step. After the ``last`` step wait until it is durable."""
        self._progress.phase("snapshot")
        begun = time.perf_counter()
        tracker = self._tracking()
        if last:
            tracker.wait_written()
            self._free = self._sum([not tracker.pool.free()]) == [0.0]
        if self._free:
            self._begin(step, begun, state, config, tracker)
        else:
            self._progress.save_skipped()
            if not self._skipping and self._world.rank == 0:
                say(0, f"no snapshot after step {step}: older ones are still being written")
        self._skipping = not self._free
        failpoints.reach("snapshot")
        if last:
            self.settle()
        self._progress.phase("step")

    def _begin(
        self, step: int, begun: float, state: TrainingState, config: Config, tracker: Tracker
    ) -> None:
        """Stage it, if every rank's state can be stored and divided."""
        captured, problem = self._capture(state)
        failpoints.reach("snapshot")
        shares = self._divide(captured)
        if captured is not None and shares is not None:
            self._stage(step, begun, captured, config, shares, tracker)
            self._unsettled = True
        elif self._world.rank == 0:
            self._failed(step, problem or "another rank's state cannot be stored, see its log")
        elif problem:
            say(self._world.rank, f"no snapshot after step {step}: {problem}")

    def _capture(self, state: TrainingState) -> tuple[Captured | None, str]:
        """The state, or None and why it cannot be stored."""
        try:
            return state.capture(self._world.rank), ""
        except UnstorableError as error:
            return None, str(error)

    def _sum(self, values: Sequence[float]) -> list[float]:
        self._progress.at("agreement")
        sums = self._world.sum([float(value) for value in values])
        self._progress.at("snapshot")
        return sums

    def _tracking(self) -> Tracker:
        if self._tracker is not None and self._tracker.broken:
            self._hear()
            self._tracker.close()
            self._tracker = None
        if self._tracker is None:
            assert self._place is not None, "restore() comes first"
            assert self._world.store is not None
            board = Board(self._world.store, self._place.writers)
            self._tracker = Tracker(self._world.rank, self._place, board, self._world.device)
        if self._later and self._hook is None:
            # Optimizers that the loop's body steps itself must wait as well.
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.before_update())
        return self._tracker

    def _divide(self, captured: Captured | None) -> Shares | None:
        """Divide the work as all ranks do; None when a rank's state cannot be stored."""
        assert self._place is not None
        high, low = divmod(captured.fingerprint() if captured is not None else 0, 1 << 12)
        main = captured.main_bytes() if captured is not None and self._world.rank == 0 else 0
        failed, main_sum, *sums = self._sum(
            [captured is None, main, high, high * high, low, low * low]
        )
        if failed or captured is None:
            return None
        # Without variance all are equal; squares of 12 bits add up exactly.
        (high1, high2, low1, low2), size = sums, self._world.size
        equal = high2 * size == high1 * high1 and low2 * size == low1 * low1
        return Shares.plan(captured, len(self._place.writers), int(main_sum), divided=equal)

    def _stage(
        self,
        step: int,
        begun: float,
        captured: Captured,
        config: Config,
        shares: Shares,
        tracker: Tracker,
    ) -> None:
        place = self._place
        assert place is not None
        if self._world.rank not in place.writers:
            return
        assemble: Assemble | None = None
        if self._world.rank == 0:
            assemble = assembler(step, captured, shares, config, place)
        try:
            image = lay_out(captured, shares, place.writers.index(self._world.rank))
            buffer = tracker.pool.take(image.bytes)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            text = f"no memory to stage it in: {getattr(error, 'strerror', None) or error}"
            tracker.failed(step, begun, text, assemble)
            return
        except ValueError as error:
            tracker.failed(step, begun, str(error), assemble)
            return
        assert buffer is not None, "free() said so"
        later = self._fill(buffer, image)
        own = tuple((n, DTYPES[t.dtype], tuple(t.shape)) for n, t in captured.own.items())
        name = data_name(step, place.nonce, self._world.rank)
        ready = mark(self._world.device) if later else None
        tracker.submit(Part(step, begun, name, image.bytes, buffer, later, ready, own, assemble))

    def _fill(self, buffer: Buffer, image: Image) -> tuple[Copy, ...]:
        """Copy what must be copied now; return the rest."""
        buffer.write(0, image.header)
        buffer.copy(image.now)
        if self._later:
            return image.later
        buffer.copy(image.later)
        return ()

    def prepare(self, state: TrainingState) -> None:
        """Between snapshots: start, once, what the first one needs, in the background."""
        if self._settings.directory is None or self._tracker is not None:
            return
        assert self._place is not None
        tracker, place = self._tracking(), self._place
        captured, _ = self._capture(state)
        if captured is None or self._world.rank not in place.writers:
            return
        shares = Shares.plan(captured, len(place.writers), captured.main_bytes(), divided=True)
        with contextlib.suppress(ValueError):  # the first snapshot will say it
            size = measure(captured, shares, place.writers.index(self._world.rank))
            tracker.prepare(size + _SLACK_BYTES)

    def settle(self) -> None:
        """Wait until every snapshot begun is durable, or has failed."""
        if self._tracker is None or not self._unsettled:
            return
        self._unsettled = False
        with self._progress.under("snapshot"):
            self._tracker.wait_written()
        self._progress.at("agreement")  # a rank that waits for its own disk is told from these
        self._world.barrier()  # all parts are reported now; a dead peer is noticed here
        if self._world.rank == 0:
            with self._progress.under("snapshot"):
                self._tracker.wait_settled()
            self._progress.at("agreement")
        self.learn(self._world.sum(self.report()))

    def _hear(self) -> None:
        """Rank 0: what became of the snapshots begun."""
        if self._tracker is None:
            return
        for outcome in self._tracker.outcomes():
            if not outcome.text:
                self.newest = outcome.step
                self._progress.saved(outcome.step)
                self._progress.save_took(outcome.seconds)
            else:
                self._failed(outcome.step, outcome.text)

    def _failed(self, step: int, text: str) -> None:
        """Rank 0: count it and say it."""
        self._progress.save_failed()
        newest = f"that of step {self.newest}" if self.newest >= 0 else "none"
        say(
            0,
            f"snapshot after step {step} failed: {text}; training goes on, the newest snapshot"
            f" is {newest}",
        )

    def close(self, *, failing: bool = False) -> None:
        """End the keeper; a snapshot that is not durable yet is given up.

        ``failing``: the others learn that this process fails only when it has ended. No longer
        than a commit under way takes is waited then.
        """
        if self._tracker is not None:
            self._tracker.close(_FAILING_SECONDS if failing else END_SECONDS)
            self._tracker = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


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
