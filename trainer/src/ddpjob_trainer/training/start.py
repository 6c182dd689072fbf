"""Start a run: read the environment, meet the other ranks, make the Run."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ddpjob_trainer import failpoints, trace
from ddpjob_trainer.comm.rendezvous import join
from ddpjob_trainer.data import fetch
from ddpjob_trainer.environment import (
    SnapshotSettings,
    WorkerEnvironment,
    overwritten_master,
    read_worker,
    take_key,
)
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.gradients import determinism
from ddpjob_trainer.gradients.ddp import DdpAveraging
from ddpjob_trainer.gradients.elastic import Averaging, ElasticAveraging
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
from ddpjob_trainer.liveness.watchdog import watch
from ddpjob_trainer.options import Log, Options, Reporting, SnapshotOptions
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.remote.client import check_upload
from ddpjob_trainer.telemetry.console import say
from ddpjob_trainer.telemetry.event_log import EventLog
from ddpjob_trainer.telemetry.progress import Progress
from ddpjob_trainer.telemetry.sinks import Sink, tensorboard
from ddpjob_trainer.training.leaving import refusal
from ddpjob_trainer.training.leaving.call_mismatch import CallMismatch
from ddpjob_trainer.training.leaving.shutdown import Shutdown
from ddpjob_trainer.training.replay.drill import Drill
from ddpjob_trainer.training.replay.recorder import Recorder
from ddpjob_trainer.training.replay.records import record_path
from ddpjob_trainer.training.replay.replay import Replay
from ddpjob_trainer.training.run import Run
from ddpjob_trainer.training.run_context import RunContext

#: Snapshot directories of this process' runs, with the last step that one of them was to do.
_BEGUN: dict[Path, int] = {}


def start(
    *,
    total_steps: int | None = None,
    epochs: int | None = None,
    global_batch: int,
    seed: int = 0,
    level: str | None = None,
    device: str = "auto",
    shards: int = 8,
    micro_batches: int = 1,
    tail: str = "drop",
    precision: str = "fp32",
    nan_policy: str = "stop",
    check_every: int = 100,
    threads: int | None = None,
    log_every: int | None = None,
    collate: fetch.Collate | None = None,
    snapshot_dir: str | os.PathLike[str] | None = None,
    snapshot_every: int | None = None,
    snapshot_keep: int | None = None,
    snapshot_staging: str = "auto",
    resume: str | os.PathLike[str] | None = None,
    resume_hyperparameters: str = "snapshot",
    allow_changes: str | Sequence[str] = (),
    snapshot_upload: str | None = None,
    events: str | os.PathLike[str] | None = None,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    log: Log | None = None,
) -> Run:
    """Join the other processes and return the Run.

    ``total_steps``: optimizer steps of the whole run, resumes included; or ``epochs``: times that
    it goes through the dataset of run.steps().
    ``global_batch``: samples per step over all processes; the processes must divide it.
    ``level``: ``resume`` (equal bits after any restart at the same world size; the default on
    the CPU), ``elastic`` (equal bits at any world size) or ``off`` (the default on CUDA).
    ``device``: ``cuda``, ``cpu``, or ``auto``: the GPU if the container was given one. A GPU that
    cannot be used is an error, not a reason to train on the CPU.
    ``shards``: level elastic cuts the global batch into so many equal parts, which the processes
    share; at most so many processes can take part.
    ``micro_batches``: batches per step and process (level elastic: per step and shard); their
    gradients are accumulated.
    ``tail``: what becomes of an epoch's incomplete last batch: ``drop``; ``pad``: filled up from
    the epoch's start.
    ``precision``: of the model's forward: ``fp32``, ``bf16``, or ``fp16`` with a GradScaler.
    ``nan_policy``: what a loss or gradient that is NaN or infinite does: ``stop`` the run with
    exit code 70, ``skip`` the update on all ranks, or ``ignore``.
    ``check_every``: steps between two checks that all ranks hold the same parameters (one comes
    before each snapshot and after the last step, too); if not, the run stops with exit code 70.
    0: never.
    ``threads``: torch's threads per process (default: OMP_NUM_THREADS, else 1).
    ``snapshot_*``: by default what the operator says in DDPJOB_SNAPSHOT_*; without a directory
    there are no snapshots. ``snapshot_staging``: whether the state is copied between two steps
    (``inline``) or beside the next one (``thread``); ``auto`` is inline on the CPU only.
    ``resume``: a file of weights to begin with: a safetensors file, as `ddpjob-trainer snapshot
    export` and run.save() write it, or a state_dict saved by torch; every process reads it. It
    counts where there is no snapshot of this run yet; afterwards its own snapshots do.
    ``resume_hyperparameters``: what a resume takes where the script now builds its optimizers and
    schedulers with others, as with another learning rate: the ``snapshot``'s or the ``script``'s.
    ``allow_changes``: what may differ from the newest snapshot, which is else refused:
    "global_batch", "data" (another dataset or order), "ema" (added or taken away),
    "namespace" (of the job that made it).
    ``snapshot_upload``: a URL, as s3://bucket/job, to which finished snapshots are copied and from
    which a fresh disk is filled (default: DDPJOB_TRAINER_SNAPSHOT_UPLOAD, else none).
    ``log_every``: steps between two lines of progress (default: 40 lines in the whole run).
    ``events``: file for one JSON object per step (default: DDPJOB_TRAINER_EVENTS, else none).
    ``tensorboard_dir``: for TensorBoard (default: DDPJOB_TRAINER_TENSORBOARD, else none).
    ``log``: a function of yours that rank 0 calls with the run's curves, as log(step, values), on
    another thread; what it raises is printed once and ends nothing.

    Alone without any environment, under torchrun and under our launcher it is the same call.
    Raises ConfigError; ends the process with exit code 75 when the others do not come.
    """
    given = locals()
    begun = time.monotonic()
    try:
        _check_guarded()
        env = read_worker(os.environ)
        key = take_key(os.environ, env.identity)
        env = replace(env, identity=replace(env.identity, secret=key.lineage.hex()))
    except ConfigError:
        Shutdown(0, RankStateWriter(None, 0))  # for the exit code of what goes up from here
        raise
    stacks.enable(env.state_dir, env.rank)  # before the record, which says that it is there
    writer = RankStateWriter(env.state_dir, env.rank)
    shutdown = Shutdown(env.rank, writer)
    failpoints.configure(env.chaos, env.rank)
    trace.configure(env.trace, env.rank, env.identity.round)
    trace.mark("start")
    if env.rank == 0 and env.world_size > 1 and (ignored := overwritten_master(os.environ)):
        say(0, ignored)
    failpoints.reach("import")
    options = Options.among(
        given
        | {
            "level": determinism.LEVELS["cpu"] if level is None else level,
            "threads": (env.threads or 1) if threads is None else threads,
        }
    )
    place = accelerator.choose(options.device, env.local_rank, os.environ)
    trace.mark("device")
    if level is None:
        options = replace(options, level=determinism.LEVELS[place.type])
    options.check(env.world_size)
    determinism.pin_arithmetic(options.level, options.threads, place)
    reporting = Reporting.among(given)
    settings = _snapshot_settings(env.snapshot, SnapshotOptions.among(given))
    _begin_in(settings, options.total_steps or options.epochs or 0)
    recorder = Recorder(env.chaos, env.rank)
    recorder.started(
        env.identity,
        total_steps=options.total_steps,
        directory=str(settings.directory),
        every=settings.every_steps,
    )
    if env.watch:
        watch(writer, env.deadlines)
    writer.mark("rendezvous")
    joining = time.monotonic()
    try:
        world = join(env, key, begun, place)
    except RuntimeError as error:
        shutdown.if_peer_lost(error)
        raise
    trace.mark("joined")
    shutdown.watch_exceptions()
    _seed_all(options.seed)
    averaging: Averaging = DdpAveraging(options, world)
    if options.level == "elastic":
        averaging = ElasticAveraging(options, world)
    progress = _make_progress(
        env, writer, options, reporting, averaging.samples, time.monotonic() - joining
    )
    snapshots = SnapshotManager(settings, world, progress)
    mismatch = CallMismatch(world, shutdown)
    record = None
    if env.replay_dir is not None and settings.directory is not None and options.level != "off":
        record = record_path(env.replay_dir, env.rank, settings.directory)
    replay = Replay(world, progress, record)
    drill = Drill(env.drill, env.identity, replay, snapshots)
    process = RunContext(
        world, shutdown, progress, snapshots, averaging, recorder, mismatch, replay, drill
    )
    return Run(process, options)


def _check_guarded() -> None:
    """Raise ConfigError in a child that reads its parent's script, unguarded."""
    # Python's own mark, of which no public name tells.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(refusal.UNGUARDED)


def _seed_all(seed: int) -> None:
    """Seed all generators, so that models built from here on are equal on all ranks."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _snapshot_settings(given: SnapshotSettings, asked: SnapshotOptions) -> SnapshotSettings:
    """Put arguments of start() before the environment."""
    asked.check()
    directory = given.directory if asked.snapshot_dir is None else asked.snapshot_dir
    url = given.upload if asked.snapshot_upload is None else asked.snapshot_upload
    if url:
        check_upload(url, directory)
    # The status knows of those in the job's directory. What ended with a pod is missed by nobody.
    known = directory == given.directory and (url or not given.ends_with_pod)
    return replace(
        given,
        known_step=given.known_step if known else 0,
        directory=directory,
        every_steps=asked.snapshot_every or given.every_steps,
        keep=asked.snapshot_keep or given.keep,
        staging=asked.snapshot_staging,
        allow_changes=asked.changes,
        upload=url,
    )


def _begin_in(settings: SnapshotSettings, total_steps: int) -> None:
    """Raise ConfigError for a second run that would begin where the first has ended.

    As one for each fold: it would train nothing, and go on with what the first has learned.
    """
    if settings.directory is None or not settings.resume:
        return
    directory = settings.directory
    if total_steps <= _BEGUN.get(directory, -1):
        raise ConfigError(
            f"a run before in this process has its snapshots in {directory}, too: this one would go"
            " on from the newest of them, with what that has learned. Give each run a directory of"
            " its own, as in start(snapshot_dir=os.environ['DDPJOB_SNAPSHOT_DIR'] + '/fold-2'); to"
            " go on with the first, ask for more total_steps"
        )
    _BEGUN[directory] = total_steps


def _sinks(asked: Reporting, env: WorkerEnvironment) -> list[Sink]:
    """Return where rank 0 sends the run's curves."""
    found = []
    board = asked.tensorboard_dir or env.tensorboard_dir
    if board is not None:
        found.append(Sink("tensorboard", partial(tensorboard, os.fspath(board))))
    if (log := asked.log) is not None:
        found.append(Sink("log", lambda _: log))
    return found


def _make_progress(
    env: WorkerEnvironment,
    writer: RankStateWriter,
    options: Options,
    given: Reporting,
    samples: int,
    rendezvous_seconds: float,
) -> Progress:
    """Make the Progress; only rank 0's opens files. Raises ConfigError."""
    main = env.rank == 0
    events = given.events if given.events is not None else env.events
    return Progress(
        env.rank,
        writer,
        total_steps=options.total_steps or 0,
        global_batch=options.global_batch,
        samples_per_step=samples,
        log_every=given.log_every or 0,
        rendezvous_seconds=rendezvous_seconds,
        reached=env.reached,
        events=EventLog(events) if main and events is not None else None,
        sinks=_sinks(given, env) if main else (),
    )
