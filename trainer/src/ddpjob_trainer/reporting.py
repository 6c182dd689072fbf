"""Put together what a run publishes through: from the environment and start()'s arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer import shards
from ddpjob_trainer.display import Display
from ddpjob_trainer.environment import WorkerEnvironment
from ddpjob_trainer.events import EventLog
from ddpjob_trainer.options import Options
from ddpjob_trainer.progress import Progress
from ddpjob_trainer.rankstate import RankStateWriter
from ddpjob_trainer.tensorboard import Board

_LOG_LINES = 40  # in a whole run, when log_every is not given
_PREFIX = len("[rank 0] ")  # of a launcher


@dataclass(frozen=True, slots=True)
class Reporting:
    """Of start(). None: what the environment says, else the default."""

    log_every: int | None
    events: str | os.PathLike[str] | None
    tensorboard_dir: str | os.PathLike[str] | None


def make_progress(
    env: WorkerEnvironment,
    writer: RankStateWriter,
    options: Options,
    given: Reporting,
    *,
    rendezvous_seconds: float,
) -> Progress:
    """Rank 0 opens files, the others write none. Raises ConfigError."""
    main = env.rank == 0
    events = Path(given.events) if given.events is not None else env.events
    board = os.fspath(given.tensorboard_dir) if given.tensorboard_dir is not None else None
    return Progress(
        env.rank,
        writer,
        total_steps=options.total_steps,
        global_batch=options.global_batch,
        samples_per_step=_samples_per_step(options, env),
        log_every=given.log_every or max(1, options.total_steps // _LOG_LINES),
        rendezvous_seconds=rendezvous_seconds,
        display=Display(options.total_steps, columns=max(0, env.columns - _PREFIX) if main else 0),
        events=EventLog(events) if main and events is not None else None,
        board=Board((board or env.tensorboard_dir) if main else None),
    )


def _samples_per_step(options: Options, env: WorkerEnvironment) -> int:
    """This rank's share of a global batch."""
    if options.level != "elastic":
        return options.global_batch // env.world_size
    mine = shards.owned(options.shards, env.world_size, env.rank)
    return len(mine) * options.global_batch // options.shards
