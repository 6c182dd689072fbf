"""Declare the arguments of start() and of prepare(), each once.

Name, type, default, bounds and choices: arguments.py checks them. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_trainer.arguments import Arguments
from ddpjob_trainer.environment import MIN_KEEP
from ddpjob_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ddpjob_trainer.data import fetch

#: Names for start(allow_changes=...): other changes make another run.
CHANGES = ("global_batch", "data", "ema", "namespace")

Several = str | Sequence[Any]  # names with commas between them, or one by one
Log = Callable[[int, Mapping[str, float]], None]  # step, values by name


#: For who gives tail="join", which is no more.
_COUNT_ONCE = (
    "; to count each sample of an epoch once, fill the dataset up with samples of weight 0, as"
    " examples/recipes/uneven.py does"
)


def _option(default: Any = MISSING, **bounds: Any) -> Any:
    """Declare an option with its ``bounds``: choices, the cure for another one, least, most."""
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
    resume: Path | None = None
    resume_hyperparameters: str = _option("snapshot", choices=("snapshot", "script"))
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
                    f" {world_size}: use fewer, or start anew with more shards"
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
class SnapshotOptions(Arguments):
    """Arguments of start(). None: the environment's value."""

    snapshot_dir: Path | None = None
    snapshot_every: int | None = _option(None, least=1)
    snapshot_keep: int | None = _option(None, least=MIN_KEEP)
    snapshot_staging: str = _option("auto", choices=("auto", "inline", "thread"))
    allow_changes: Several = ()
    snapshot_upload: str | None = None

    def check(self) -> None:
        """Raise ConfigError for an invalid value."""
        odd = self.changes.difference(CHANGES)
        if odd:
            names = ", ".join(CHANGES)
            raise ConfigError(f"allow_changes: {min(odd)!r} must be one of {names}")

    @property
    def changes(self) -> frozenset[str]:
        """Return the names in allow_changes."""
        given = self.allow_changes
        names = given.split(",") if isinstance(given, str) else given
        return frozenset(str(name).strip() for name in names if str(name).strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting(Arguments):
    """Arguments of start(). None: the environment's value, else the default."""

    log_every: int | None = _option(None, least=1)
    tensorboard_dir: Path | None = None
    log: Log | None = None
    events: Path | None = None


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
