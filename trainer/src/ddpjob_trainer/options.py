"""Declare the arguments of start() and of prepare(), each once.

Name, type, default, bounds and choices: arguments.py checks them. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from ddpjob_trainer.arguments import Arguments
from ddpjob_trainer.environment import MIN_KEEP
from ddpjob_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ddpjob_trainer.data import fetch

#: Names for Snapshots.allow_changes: other changes make another run.
CHANGES = ("global_batch", "data", "ema", "namespace")

Log = Callable[[int, Mapping[str, float]], None]  # step, values by name


#: For who gives tail="join", which is no more.
_COUNT_ONCE = (
    "; to count each sample of an epoch once, fill the dataset up with samples of weight 0, as"
    " examples/recipes/uneven.py does"
)


def _option(default: Any = MISSING, **bounds: Any) -> Any:
    """Declare an option. ``bounds``: choices, a cure, least, most."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Arguments):
    """Arguments of start() for the whole run."""

    total_steps: int | None = _option(None, least=1)
    epochs: int | None = _option(None, least=1)  # in place of total_steps
    global_batch: int = _option(least=1)
    seed: int = _option(0, least=-(2**63), most=2**64 - 1)
    level: str = _option("resume", choices=("off", "resume", "elastic"))
    device: str = _option("auto", choices=("auto", "cuda", "cpu"))
    shards: int = _option(8, least=1)
    micro_batches: int = _option(1, least=1)
    tail: str = _option("drop", choices=("drop", "pad"), cure=_COUNT_ONCE)
    precision: str = _option("fp32", choices=("fp32", "bf16", "fp16"))
    nan_policy: str = _option("stop", choices=("stop", "skip", "ignore"))
    check_every: int = 100
    threads: int = _option(1, least=1, most=1024)
    resume: str | os.PathLike[str] | None = None
    collate: fetch.Collate | None = None

    def check(self, world_size: int) -> None:
        """Raise ConfigError for values that do not fit ``world_size`` processes."""
        if (self.total_steps is None) == (self.epochs is None):
            raise ConfigError("start() needs total_steps or epochs, and not both")
        count, sharers = world_size, f"{world_size} processes"
        if self.level == "elastic":
            count, sharers = self.shards, f"shards={self.shards}"
            if world_size > count:
                raise ConfigError(
                    f"level='elastic' with shards={count} can use at most {count} processes, not"
                    f" {world_size}: use fewer, or start over with more shards"
                )
        if self.micro_batches > 1:
            sharers += f" x micro_batches={self.micro_batches}"
        parts = count * self.micro_batches
        if self.global_batch % parts:
            raise ConfigError(
                f"global_batch={self.global_batch} cannot be divided by {sharers}: use a multiple"
                f" of {parts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group(Arguments):
    """Options of start() that go together."""

    @classmethod
    def taken(cls, given: object) -> Self:
        """Check what start() was given; None: the defaults. Raises ConfigError."""
        group, word = cls() if given is None else given, cls.__name__.lower()
        if not isinstance(group, cls):
            raise ConfigError(f"{word} must be made as {word}=ddp.{cls.__name__}(...)")
        return cls.among({one.name: getattr(group, one.name) for one in fields(cls)}, f"{word}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots(_Group):
    """Say where snapshots are, when they are made, and what a resume takes from them.

    ``directory``: path of a volume that all pods share (default: DDPJOB_SNAPSHOT_DIR, else there
    are no snapshots).
    ``every``: steps from one to the next, or "Auto": as often as pauses for them take less than
    1 % of the time (default: DDPJOB_SNAPSHOT_EVERY_STEPS, else "Auto").
    ``keep``: how many stay, at least 2 (default: DDPJOB_SNAPSHOT_KEEP, else 3).
    ``staging``: whether the state is copied between two steps (``inline``) or beside the next one
    (``thread``); ``auto``, the default, is inline on the CPU only.
    ``upload``: a URL, as s3://bucket/job: finished snapshots go there, and a fresh disk is filled
    from it (default: DDPJOB_TRAINER_SNAPSHOT_UPLOAD, else none).
    ``hyperparameters``: if the script's optimizers and schedulers have others now, such as another
    learning rate, a resume takes the ``snapshot``'s (default) or the ``script``'s.
    ``allow_changes``: what may differ from the newest snapshot (default: nothing), in a list or
    with commas between: "global_batch", "data" (another dataset or order), "ema" (added or
    removed), "namespace" (of the job that made it).
    """

    directory: str | os.PathLike[str] | None = _option(None)
    every: int | str | None = _option(None, least=1)
    keep: int | None = _option(None, least=MIN_KEEP)
    staging: str = _option("auto", choices=("auto", "inline", "thread"))
    upload: str | None = _option(None)
    hyperparameters: str = _option("snapshot", choices=("snapshot", "script"))
    allow_changes: str | Sequence[str] = _option((), choices=CHANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging(_Group):
    """Say where rank 0 sends the run's curves and what run.log() is given.

    ``every``: steps between two lines of progress (default: 40 lines in the whole run).
    ``events``: file for one JSON object per step (default: DDPJOB_TRAINER_EVENTS, else none).
    ``tensorboard``: directory for TensorBoard (default: DDPJOB_TRAINER_TENSORBOARD, else none).
    ``log``: your function, called as log(step, values) on another thread; what it raises is
    printed once and ends nothing (default: none).
    """

    every: int | None = _option(None, least=1)
    events: str | os.PathLike[str] | None = _option(None)
    tensorboard: str | os.PathLike[str] | None = _option(None)
    log: Log | None = _option(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Arguments):
    """Arguments of prepare(), for a model. Names and meaning are PyTorch's."""

    scheduler_every: str | None = _option(None, choices=("step", "epoch"))  # None: step
    clip_grad_norm: float | None = None
    ema: float | None = None
    compile: bool | str = False
    sync_batchnorm: bool = False
    bucket_cap_mb: float | None = _option(None, most=1e6)
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    comm_hook: str | None = _option(None, choices=("bf16", "fp16"))
    grad_scaler: torch.amp.GradScaler | None = None

    def check(self) -> None:
        """Raise ConfigError for an invalid value."""
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema={self.ema} must be a decay between 0 and 1, as 0.999")
