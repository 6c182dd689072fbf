"""Start a run: read the environment, meet the other ranks, make the Run."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ddpjob_trainer import failpoints, trace
from ddpjob_trainer.comm.rendezvous import join
from ddpjob_trainer.data import fetch, generators
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
from ddpjob_trainer.liveness.hang import watch
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
from ddpjob_trainer.options import Logging, Options, Snapshots
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.remote.client import check_upload
from ddpjob_trainer.telemetry.event_log import EventLog
from ddpjob_trainer.telemetry.profile import Profiler
from ddpjob_trainer.telemetry.progress import Progress
from ddpjob_trainer.telemetry.run_log import Sink, tensorboard
from ddpjob_trainer.training.replay.records import Recorder, record_path
from ddpjob_trainer.training.replay.replay import Drill, Replay
from ddpjob_trainer.training.rescue import Rescue
from ddpjob_trainer.training.run import Run
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.shutdown import UNGUARDED, CallMismatch, Shutdown

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
    collate: fetch.Collate | None = None,
    resume: str | os.PathLike[str] | None = None,
    snapshots: Snapshots | None = None,
    logging: Logging | None = None,
) -> Run:
    """Join the other processes and return the Run.

    ``total_steps``: optimizer steps of the whole run, resumes included; or ``epochs``: times that
    it goes through the dataset of run.steps().
    ``global_batch``: samples per step over all processes; the processes must divide it.
    ``level``: ``resume`` (equal bits after any restart at the same world size; the default on
    the CPU), ``elastic`` (equal bits at any world size) or ``off`` (the default on CUDA).
    ``device``: ``cuda``, ``cpu``, or ``auto``: the GPU if the container has one. A GPU that
    cannot be used is an error.
    ``shards``: equal parts of the global batch at level elastic, which the processes share; the
    most processes that can take part.
    ``micro_batches``: batches per step and process (level elastic: per step and shard); their
    gradients are accumulated.
    ``tail``: an epoch's incomplete last batch: ``drop`` it, or ``pad`` it from the epoch's start.
    ``precision``: of the model's forward: ``fp32``, ``bf16``, or ``fp16`` with a GradScaler.
    ``nan_policy``: at a loss or gradient that is NaN or infinite ``stop`` the run with exit code
    70, ``skip`` the update on all ranks, or ``ignore`` it.
    ``check_every``: steps between two checks that all ranks hold the same parameters; if not, the
    run stops with exit code 70. Each snapshot and the last step are checked too. 0: never.
    ``threads``: torch's threads per process (default: OMP_NUM_THREADS, else 1).
    ``resume``: a file of weights to begin with, if this run has no snapshot yet: safetensors, as
    `ddpjob-trainer snapshot export` and run.save() write it, or a state_dict of torch.
    ``snapshots``: see Snapshots; ``logging``: see Logging. None: as the environment says.

    The call is the same alone, under torchrun and under our launcher. Raises ConfigError; ends
    the process with exit code 75 when the others do not come.
    """
    given = locals() | {"level": determinism.LEVELS["cpu"] if level is None else level}
    begun = time.monotonic()
    try:
        # Python's own mark of a child that reads the script, of which no public name tells.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(UNGUARDED)
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
    given["threads"] = (env.threads or 1) if threads is None else threads
    options = Options.among(given)
    place = accelerator.choose(options.device, env.local_rank, os.environ)
    trace.mark("device")
    if level is None:
        options = replace(options, level=determinism.LEVELS[place.type])
    if env.most and options.level != "elastic":
        raise ConfigError(
            f"level={options.level!r} has other bits at another number of processes, and this job's"
            " changes: use level='elastic', or leave out spec.minReplicas"
        )
    options.check(max(env.world_size, env.most))
    determinism.pin_arithmetic(options.level, options.threads, place)
    reporting = Logging.taken(logging)
    settings = _snapshot_settings(env.snapshot, Snapshots.taken(snapshots))
    _begin_in(settings, options.total_steps or options.epochs or 0)
    recorder = Recorder(env.chaos, env.rank)
    recorder.started(env.identity, options.total_steps, settings)
    if env.watch:
        watch(writer, env.deadlines)
    writer.mark("rendezvous")
    joining = time.monotonic()
    with shutdown.listening:
        world = join(env, key, begun, place)
    trace.mark("joined")
    shutdown.watch_exceptions()
    torch.manual_seed(options.seed)  # the GPU's, too: models built from here on are equal
    generators.seed_generators(options.seed)
    keeps = env.rescue and settings.directory is not None and place.type == "cpu"
    rescues = env.state_dir if keeps and world.size > 1 else None
    averaging: Averaging = DdpAveraging(options, world, rescue=rescues is not None)
    if options.level == "elastic":
        averaging = ElasticAveraging(options, world)
    progress = _make_progress(
        env, writer, options, reporting, averaging.samples, time.monotonic() - joining
    )
    manager = SnapshotManager(settings, world, progress)
    mismatch = CallMismatch(world, shutdown)
    record = None
    if env.replay_dir is not None and settings.directory is not None and options.level != "off":
        record = record_path(env.replay_dir, env.rank, settings.directory)
    replay = Replay(world, progress, record)
    drill = Drill(env.drill, env.identity, replay, manager)
    rescue = None
    if rescues is not None:
        rescue = Rescue(rescues, world, manager)
        shutdown.before_leaving = rescue.hold
    profiler = Profiler(writer, env.rank, env.state_dir, settings.directory)
    process = RunContext(
        world, shutdown, progress, manager, averaging, recorder, mismatch, replay, drill, profiler,
        rescue, env.most > 0,
    )  # fmt: skip
    return Run(process, options)


def _snapshot_settings(given: SnapshotSettings, asked: Snapshots) -> SnapshotSettings:
    """Put arguments of start() before the environment."""
    directory = given.directory if asked.directory is None else Path(asked.directory)
    url = given.upload if asked.upload is None else asked.upload
    if url:
        check_upload(url, directory)
    every = given.every_steps if asked.every is None else asked.every
    # The status knows of those in the job's directory. What ended with a pod is missed by nobody.
    known = directory == given.directory and (url or not given.ends_with_pod)
    return replace(
        given,
        known_step=given.known_step if known else 0,
        directory=directory,
        every_steps=None if isinstance(every, str) else every,
        keep=asked.keep or given.keep,
        staging=asked.staging,
        hyperparameters=asked.hyperparameters,
        allow_changes=frozenset(asked.allow_changes),
        upload=url,
    )


def _begin_in(settings: SnapshotSettings, total_steps: int) -> None:
    """Raise ConfigError for a second run, as of another fold, that would go on with the first."""
    directory = settings.directory
    if directory is None or not settings.resume:
        return
    if total_steps <= _BEGUN.get(directory, -1):
        raise ConfigError(
            f"an earlier run of this process has its snapshots in {directory}, too: this one would"
            " continue from the newest of them. Give each run its own"
            " directory, such as snapshots=ddp.Snapshots(directory=os.environ["
            "'DDPJOB_SNAPSHOT_DIR'] + '/fold-2'); to go on with the first, ask for more total_steps"
        )
    _BEGUN[directory] = total_steps


def _sinks(asked: Logging, env: WorkerEnvironment) -> list[Sink]:
    """Return where rank 0 sends the run's curves."""
    board = asked.tensorboard or env.tensorboard_dir
    found = [Sink("tensorboard", partial(tensorboard, os.fspath(board)))] if board else []
    if (log := asked.log) is not None:
        found.append(Sink("log", lambda _: log))
    return found


def _make_progress(
    env: WorkerEnvironment,
    writer: RankStateWriter,
    options: Options,
    given: Logging,
    samples: int,
    met: float,
) -> Progress:
    """Make the Progress; only rank 0's opens files. ``met``: seconds. Raises ConfigError."""
    main = env.rank == 0
    events = env.events if given.events is None else Path(given.events)
    return Progress(
        env.rank,
        writer,
        total_steps=options.total_steps or 0,
        global_batch=options.global_batch,
        samples_per_step=samples,
        log_every=given.every or 0,
        rendezvous_seconds=met,
        reached=env.reached,
        events=EventLog(events) if main and events is not None else None,
        sinks=_sinks(given, env) if main else (),
    )
