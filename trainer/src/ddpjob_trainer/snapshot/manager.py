"""Restore a snapshot once and save when due: the loop's view of snapshots.

Every rank stages its part and trains on; a thread writes. Failing to save is no reason to stop
training: it is said, counted, and tried again. What can never be stored ends the run at once: it
would train to its end without a snapshot.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddpjob_contract import Resumed as Origin
from ddpjob_trainer import failpoints
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.interval import Interval
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles
from ddpjob_trainer.snapshot.remote.client import Uploads, fetch_if_newer
from ddpjob_trainer.snapshot.restore.resume import Resumed, resume
from ddpjob_trainer.snapshot.save.layout import Captured
from ddpjob_trainer.snapshot.save.parts import PartReports
from ddpjob_trainer.snapshot.save.writer import SnapshotWriter
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import UnstorableError
from ddpjob_trainer.telemetry.progress import Progress

# --- Origin: the run that made the snapshot -------------------------------------------------------
# compare_configs() refuses what cannot go on and warns where only the bits are lost. resumed_from()
# says whose snapshot it is: a job that is deleted and applied again, with another script perhaps,
# finds those of the first.

Config = Mapping[str, Any]
_CHANGED = {
    "samples": "the dataset is another one",
    "shards": "the result would be another one",
    "world_size": "each has its own stream",
}
_WORDS = {"script": "another script", "arguments": "other arguments"}


def compare_configs(stored: Config, mine: Config, rank: int, allowed: Collection[str]) -> None:
    """Refuse to continue another run; warn where only bitwise equality is lost."""
    elastic = mine["level"] == "elastic"
    for name, change in (
        ("order", "data"),
        ("seed", ""),
        ("global_batch", "global_batch"),
        ("samples", "data"),
        ("tail", ""),
        # Each process has another stream.
        *([("world_size", "")] if mine["order"] == "stream" else []),
        *([("shards", "")] if elastic and stored.get("shards") is not None else []),
    ):
        if stored.get(name) == mine[name]:
            continue
        if change in allowed:
            if rank == 0:
                say(0, f"{name} was {stored.get(name)} and is {mine[name]}, as allow_changes says")
            continue
        what = _CHANGED.get(name, "the data order would change")
        allow = f", go on with snapshots=ddp.Snapshots(allow_changes={change!r})" if change else ""
        raise ConfigError(
            f"the snapshot was made with {name}={stored.get(name)}, now it is {mine[name]}: {what}."
            f" Use the old value{allow}, or start over with snapshot.resume: Never"
        )
    if rank != 0 or mine["level"] == "off":
        return
    exact = ("micro_batches", "precision", "level", "threads", "torch", "device")
    names = exact if elastic else ("world_size", *exact)
    pairs = [(name, stored.get(name), mine[name]) for name in names]
    are = mine.get("accelerator", {})
    were = stored.get("accelerator", are)
    pairs += [(name, were.get(name), are.get(name)) for name in sorted(were.keys() | are.keys())]
    for name, was, now in pairs:
        if was != now:
            say(
                0,
                f"warning: {name} was {was} and is {now}: the result will"
                " not equal an undisturbed run's bit for bit",
            )


def identity_marks(identity: Identity) -> dict[str, Any]:
    """Return what a snapshot's configuration keeps of it: plain values.

    Without an operator each run has another uid, though it is meant to go on from the last.
    """
    alone = not identity.unique or identity.uid.startswith("local-")
    job = None if alone else identity.uid
    return {"job": job, "namespace": identity.namespace, "program": _program()}


def resumed_from(step: int, stored: Config, config: Config) -> Origin:
    """Say what training goes on from; return it for the launcher.

    ``stored``, ``config``: of the snapshot and of this run, with identity_marks(). On rank 0.
    """
    found: Origin = {"step": step}
    uid, mine = stored.get("job"), config.get("job")
    if isinstance(uid, str) and isinstance(mine, str) and uid != mine:
        found["uid"] = uid
    were, are = stored.get("program"), config.get("program")
    if isinstance(were, Mapping) and isinstance(are, Mapping):
        known = (name for name in _WORDS if were.get(name) and are.get(name))
        found["changed"] = [name for name in known if were[name] != are[name]]  # type: ignore[misc]
    say(0, f"resuming after step {step}{_origin_text(found)}")
    if step >= config["total_steps"]:
        say(0, f"nothing is left to train of {config['total_steps']} steps: 0 steps trained")
    return found


def _origin_text(found: Origin) -> str:
    said = ""
    if "uid" in found:
        said = (
            f" of another job (uid {found['uid']}), whose snapshots lie here; to start over use"
            " another name or snapshot.resume: Never, or delete them"
        )
    if changed := found.get("changed"):
        said += f"; that was made by {' and '.join(_WORDS[name] for name in changed)}"
    return said


def _program() -> dict[str, str | None]:
    """Hash the script and its arguments, which may hold what is nobody's business."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        script = None if file is None else _digest(Path(file).read_bytes())
    except OSError:
        script = None
    return {
        "script": script,
        "arguments": _digest("\0".join(sys.argv[1:]).encode(errors="replace")),
    }


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


# --- The manager ----------------------------------------------------------------------------------

#: After the last step, which may be that of a SIGTERM with its grace period; and on the way out.
_LAST_UPLOAD_SECONDS = 15.0
_UPLOAD_SECONDS = 300.0


class SnapshotManager:
    """One process's view of the snapshots. Every rank calls the same methods at the same step."""

    def __init__(self, settings: SnapshotSettings, world: World, progress: Progress) -> None:
        self._settings = settings
        self.enabled = settings.directory is not None
        self.every = settings.every_steps  # None: rank 0 chooses
        self._interval = Interval() if self.every is None else None
        self._next = 0  # so chosen, the step of the next one, on all ranks alike; 0: unknown
        self._last = 0  # the step of the one before
        self.hyperparameters = settings.hyperparameters
        self._world = world
        self._progress = progress
        self._writer: SnapshotWriter | None = None
        self._hook: RemovableHandle | None = None
        self._writers: tuple[int, ...] = ()  # ranks that see the directory
        self._prepared = False
        self._in_progress = False
        self.has_room = True  # on all ranks alike: each has a buffer for save()
        self.newest = -1  # step of the newest snapshot that another rank has read back
        self.made = -1  # of the newest that is durable
        self._uploaded = -1  # of the newest that the object store has
        self._reported = -1  # what the status may name
        # What ends with the pod is durable once it was uploaded.
        self._counts_uploads = bool(settings.ends_with_pod and settings.upload)
        self._uploads: Uploads | None = None  # on rank 0, where snapshots are uploaded

    def check(self, state: TrainingState) -> None:
        """Raise ConfigError now for what the first snapshot could not store."""
        if self._settings.directory is None:
            return
        with _refusing(UnstorableError, ValueError):
            state.capture(self._world.rank).check()

    # --- Restore -------------------------------------------------------------------------

    def restore(self, state: TrainingState, config: Config, rank: int) -> tuple[int, Config]:
        """Load the newest snapshot; return its step and configuration, or 0 and {}.

        ``rank``: whose generators this process takes.
        """
        if self._settings.directory is None:
            return 0, {}
        if self._settings.upload and self._world.rank == 0:
            self._uploaded = fetch_if_newer(
                self._settings, self._world.identity, self._progress.alive
            )
        resumed = resume(self._settings.directory, self._world, self._settings)
        failpoints.reach("load")
        if (source := resumed.source) is None:
            self._open(resumed)
            return 0, {}
        allowed = self._settings.allow_changes
        compare_configs(source.manifest.config, config, self._world.rank, allowed)
        state.restore(source, rank, ema_may_differ="ema" in allowed)
        self._open(resumed)
        self.made = self._last = source.step
        # A rescue is no progress: else a failure at the same step would be met for ever.
        rescued = source.manifest.config.get("rescued")
        self._durable(source.step if rescued is None else int(rescued["newest"]), -1)
        if self._world.rank == 0:
            self._progress.began_from(resumed_from(source.step, source.manifest.config, config))
        return source.step, source.manifest.config

    def _open(self, resumed: Resumed) -> None:
        """Start the threads that write this incarnation's snapshots, and clean up before."""
        settings, world = self._settings, self._world
        assert settings.directory is not None
        assert world.board is not None
        nonce = world.broadcast_bytes(secrets.token_hex(4).encode()).decode()
        sequence, size = resumed.start.sequence, world.size
        files = SnapshotFiles(settings.directory, sequence, nonce, settings.keep)
        reports = PartReports(world.board, resumed.writers)
        later = settings.staging == "thread" or (
            settings.staging == "auto" and world.accelerator.queues
        )
        self._writers = resumed.writers
        parent = resumed.source.step if resumed.source else -1
        self._writer = SnapshotWriter(
            world.rank, files, reports, world.accelerator, later=later, parent=parent
        )
        if later:  # optimizers that the loop's body steps itself must wait as well
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.wait_for_readers())
        if blind := [rank for rank in range(size) if rank not in resumed.writers]:
            what = (
                f"{len(blind)} of {size} ranks do not see rank 0's snapshot directory"
                f" (rank {blind[0]} is the first), so they write no part of the snapshots"
            )
            cure = "Give all pods one shared volume (ReadWriteMany), or set snapshots.upload"
            say(world.rank, what if settings.upload else f"warning: {what}. {cure}")
        if settings.upload and world.rank == 0:
            self._uploads = Uploads(settings, sequence, self._was_uploaded, world.identity.secret)

    # --- Save ----------------------------------------------------------------------------

    def due(self, step: int, *, last: bool) -> bool:
        """Tell whether a snapshot is due after this step."""
        return self.enabled and (last or self.around(step)[0] == step)

    def around(self, step: int) -> tuple[int, int]:
        """Return the newest step up to this one after which a snapshot is due, and the next one.

        The same on all ranks, once receive() was called in the step; 0: none, unknown.
        """
        if self.every is not None:
            before = step // self.every * self.every
            return before, before + self.every
        return (step, 0) if 0 < self._next <= step else (self._last, self._next)

    def report(self) -> list[float]:
        """Settle finished snapshots; return numbers to add up over all ranks, before each save().

        By rank 0 the newest verified, uploaded and durable steps plus 1, and the next one to save
        where it chooses that; whether this rank has no buffer to save into.
        """
        self._take_outcomes()
        full = float(self._writer is not None and not self._writer.pool.free())
        mine = (self.newest + 1, self._uploaded + 1, self.made + 1, self._choose())
        return [*map(float, mine if self._world.rank == 0 else (0, 0, 0, 0)), full]

    def _choose(self) -> int:
        """Return the step of the next snapshot, chosen on rank 0; 0: the last is on its way."""
        if self._interval is None or self._writer is None or self._world.rank:
            return 0
        self._interval.stepped(*self._progress.took, self._last)
        if self._writer.saving():
            if why := self._writer.behind():
                say(0, f"no snapshot is due: {why}")
            return 0
        chosen = self._interval.next(self._last)
        if news := self._interval.news():
            say(0, news)
            self._progress.saves_every(self._interval.every)
        return chosen

    def receive(self, reported: Sequence[float]) -> None:
        """Take in the sums of report(). No rank claims a snapshot that is not yet durable."""
        newest, uploaded, made, self._next, full = *map(int, reported[:4]), reported[4]
        self.has_room = not full
        self.made = max(self.made, made - 1)
        self._durable(newest - 1, uploaded - 1)

    def _durable(self, newest: int, uploaded: int) -> None:
        self.newest, self._uploaded = max(newest, self.newest), max(uploaded, self._uploaded)
        counts = self._uploaded if self._counts_uploads else self.newest
        if counts > self._reported:
            self._reported = counts
            self._progress.saved(counts)

    def wait_for_readers(self) -> None:
        """Wait until the snapshot of the step before has read the parameters."""
        if self._writer is not None:
            self._writer.wait_copied()

    def alone(self) -> tuple[SnapshotFiles | None, float]:
        """Return where this rank may write a whole snapshot, None: nowhere, and how long it takes.

        The seconds are reckoned by its newest part; 0: none has been written.
        """
        if self._writer is None or self._world.rank not in self._writers:
            return None, 0.0
        return self._writer.files, self._writer.seconds * len(self._writers)

    def save(self, step: int, state: TrainingState, config: Config, *, last: bool) -> None:
        """Stage a snapshot of this step. After the ``last`` step wait until it is durable."""
        self._progress.phase("snapshot")
        self._last = step
        begun = time.perf_counter()
        writer, found = self._writer, None
        assert writer is not None, "restore() comes first"
        if last:
            writer.wait_written()
            self._progress.at("agreement")  # lest others wait in here for a rank that waits above
            self._world.barrier()
            self._progress.at("snapshot")
            found = self._capture(state)
            self._agree()
            self._progress.at("snapshot")
        if self.has_room:
            failpoints.reach("snapshot")
            captured = found or self._capture(state)
            if self._world.rank in self._writers:
                with _refusing(ValueError):
                    writer.save(step, begun, captured, config)
            self._in_progress = True
        else:
            self._progress.metrics.add("snapshots_skipped")
            if self._world.rank == 0 and (why := writer.behind()):
                say(0, f"no snapshot after step {step}: {why}")
        failpoints.reach("snapshot")
        if last:
            self.wait_durable()
            if self._settings.upload:
                self._upload_rest(_LAST_UPLOAD_SECONDS)
                self._world.barrier()
        self._progress.phase("step")

    def _capture(self, state: TrainingState) -> Captured:
        """Return the state. Collective, as a state_dict() may be. Raises ConfigError.

        What else goes wrong in user code ends the process: the others may wait for it there.
        """
        with _refusing(UnstorableError):
            return state.capture(self._world.rank)

    def _agree(self) -> None:
        self._progress.at("agreement")
        self.receive(self._world.sum(self.report()))

    def prepare(self, state: TrainingState) -> None:
        """Allocate, once and between snapshots, what the first one needs, in the background."""
        if self._writer is None or self._prepared:
            return
        self._prepared = True
        captured = self._capture(state)
        if self._world.rank in self._writers:
            self._writer.prepare(captured)

    def wait_durable(self) -> None:
        """Wait until every snapshot begun is durable and was read back, or has failed."""
        if self._writer is None or not self._in_progress:
            return
        self._in_progress = False
        self._writer.hurry(True)
        with self._progress.under("snapshot"):
            self._writer.wait_written()
        self._progress.at("agreement")  # sets a rank that waits for its own disk apart
        self._world.barrier()  # all parts are reported now; a dead peer is noticed here
        if self._world.rank == 0:
            with self._progress.under("snapshot"):
                self._writer.wait_settled()
        self._agree()
        self._writer.hurry(False)
        self._writer.check()

    def mark(self, facts: Config) -> None:
        """Add facts to the newest snapshot, which wait_durable() has made durable, on rank 0."""
        if self._writer is not None and self._world.rank == 0:
            with self._progress.under("snapshot"):
                text = self._writer.mark(self.made, facts)
            if text:
                self._failed(self.made, text)
            elif self._uploads is not None:
                self._uploads.committed(self.made)

    def _upload_rest(self, seconds: float) -> None:
        """Wait so long for the upload of the newest snapshot, on rank 0."""
        if self._uploads is not None:
            if self.made > max(self.newest, self._uploaded):  # the disk may be gone before
                self._uploads.committed(self.made)
            with self._progress.under("snapshot"):
                self._uploads.wait(seconds, lambda: self._progress.at("snapshot"))

    def _was_uploaded(self, step: int | None) -> None:
        self._progress.uploaded(step)
        if step is not None:
            self._durable(-1, step)

    def _take_outcomes(self) -> None:
        """Take in what became of the snapshots begun, on rank 0."""
        if self._uploads is not None:
            self._uploads.receive()
        if self._writer is None:
            return
        for outcome in self._writer.outcomes():
            if outcome.never:
                raise ConfigError(f"no snapshot can be made: {outcome.text}")
            if self._interval is not None:
                self._interval.durable = outcome.seconds
            if outcome.text:
                self._failed(outcome.step, outcome.text)
            elif not outcome.verified:
                self.made = max(self.made, outcome.step)
                self._progress.metrics.observe("snapshot_seconds", outcome.seconds)
            else:
                self._durable(outcome.step, -1)
                self._progress.metrics.observe("snapshot_verified_seconds", outcome.seconds)
                if self._uploads is not None:
                    self._uploads.committed(outcome.step)

    def _failed(self, step: int, text: str) -> None:
        """Count it and say it, on rank 0."""
        self._progress.metrics.add("snapshot_failures")
        newest = f"that of step {self.newest}" if self.newest >= 0 else "none yet"
        gone = self._writer is not None and self._writer.gone
        left = "" if gone else f", the newest that was read back is {newest}"
        say(0, f"snapshot after step {step} failed: {text}; training goes on{left}")

    def close(self) -> None:
        """End its threads and the upload. A snapshot that is not durable yet is given up."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._uploads is not None:
            self._upload_rest(_UPLOAD_SECONDS)
            self._uploads.close()
            self._uploads = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


@contextlib.contextmanager
def _refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turn these errors, of what no snapshot can hold, into the refusal of the run."""
    try:
        yield
    except ConfigError:
        raise
    except errors as error:
        raise ConfigError(f"no snapshot can be made: {error}") from error
