"""What a run is asked for: the arguments of start() and of prepare(), each declared here, once.

Name, type, default, help and choices: from here the checks have them, and the command line of
`ddpjob-trainer task`. Never imports torch, since the launcher reads that command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ddpjob_trainer.environment import DEFAULT_EVERY_STEPS, DEFAULT_KEEP, MIN_KEEP
from ddpjob_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ddpjob_trainer.data import fetch

#: What start(allow_changes=...) may name: a run that goes on with other data is another run.
CHANGES = ("global_batch", "data", "ema")


def _option(text: str, default: Any = MISSING, **more: Any) -> Any:
    """An option that the command line has, too. ``more``: choices, metavar."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True)
class _Options:
    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Self:
        """Pick them out of the arguments. Raises ConfigError for no integer where one must be."""
        values = {one.name: given[one.name] for one in fields(cls)}
        for one in fields(cls):
            value = values[one.name]
            if one.type == "int" or (one.type == "int | None" and value is not None):
                try:  # numbers from numpy are welcome, but a snapshot's JSON holds plain ones only
                    values[one.name] = index(value)
                except TypeError as error:
                    raise ConfigError(f"{one.name}={value!r} must be an integer") from error
        return cls(**values)

    @classmethod
    def offered(cls) -> Iterator[Field[Any]]:
        """Those that the command line has."""
        return (one for one in fields(cls) if one.metadata)

    def check_choices(self) -> None:
        """Raise ConfigError for a value that is none of its option's choices."""
        for one in self.offered():
            value, allowed = getattr(self, one.name), one.metadata.get("choices")
            if allowed and value != one.default and value not in allowed:
                names = ", ".join(map(repr, allowed if one.default else (None, *allowed)))
                raise ConfigError(f"{one.name}={value!r} must be one of {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(_Options):
    """Of start(): they hold for the whole run."""

    total_steps: int = _option("optimizer steps of the whole run")
    global_batch: int = _option("samples per step, all processes")
    seed: int = _option("of weights, data order, dropout", 0)
    level: str = _option(
        "bits kept over restarts; on CUDA off, else", "resume", choices=("off", "resume", "elastic")
    )
    shards: int = _option("equal parts of the global batch at level elastic", 8)
    micro_batches: int = _option("gradients accumulated per step", 1)
    tail: str = _option("an epoch's incomplete last batch", "drop", choices=("drop", "pad", "join"))
    precision: str = _option("of the forward", "fp32", choices=("fp32", "bf16", "fp16"))
    nan_policy: str = _option(
        "at a loss or gradient that is not finite", "stop", choices=("stop", "skip", "ignore")
    )
    check_every: int = _option("steps between comparisons of the ranks, 0: never", 100)
    threads: int = _option("torch's threads per process; $OMP_NUM_THREADS, else", 1)
    resume: Path | None = _option(
        "weights to begin with, if there is no snapshot yet", None, metavar="FILE"
    )
    collate: fetch.Collate | None = None

    def check(self, world_size: int) -> None:
        """Raise ConfigError for a value that no run can have."""
        for name in ("total_steps", "global_batch", "micro_batches", "shards", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        self.check_choices()
        if self.check_every < 0:
            raise ConfigError(f"check_every={self.check_every} must not be negative; 0: never")
        count, sharers = world_size, f"{world_size} processes"
        if self.level == "elastic":
            count, sharers = self.shards, f"shards={self.shards}"
            if world_size > count:
                raise ConfigError(
                    f"level='elastic' with shards={count} can use at most {count} processes, not"
                    f" {world_size}: use fewer, or start anew with more shards"
                )
        if self.global_batch % count:
            raise ConfigError(
                f"global_batch={self.global_batch} cannot be divided by {sharers}: use a multiple"
                f" of {count}"
            )
        parts = count * self.micro_batches
        if self.global_batch % parts:
            raise ConfigError(
                f"global_batch={self.global_batch} cannot be divided by {sharers} x"
                f" micro_batches={self.micro_batches}: use a multiple of {parts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOptions(_Options):
    """Of start(). None: what the environment says."""

    snapshot_dir: Any = _option("default: what the DDPJob says, else none", None, metavar="DIR")
    snapshot_every: int | None = _option(
        f"steps between two snapshots (default: {DEFAULT_EVERY_STEPS})", None
    )
    snapshot_keep: int | None = _option(f"snapshots to keep (default: {DEFAULT_KEEP})", None)
    snapshot_staging: str = _option(
        "copy the state between steps or beside them", "auto", choices=("auto", "inline", "thread")
    )
    allow_changes: Any = _option(f"of {','.join(CHANGES)}: may be changed", (), metavar="NAMES")
    snapshot_upload: str | None = _option(
        "copy finished ones there, as s3://bucket/job", None, metavar="URL"
    )

    def check(self) -> None:
        """Raise ConfigError for a value that no run can have."""
        self.check_choices()
        for name, least in (("snapshot_every", 1), ("snapshot_keep", MIN_KEEP)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        odd = self.changes.difference(CHANGES)
        if odd:
            names = ", ".join(CHANGES)
            raise ConfigError(f"allow_changes: {min(odd)!r} must be one of {names}")

    @property
    def changes(self) -> frozenset[str]:
        """Names in allow_changes."""
        given = self.allow_changes
        names = given.split(",") if isinstance(given, str) else given
        return frozenset(name.strip() for name in names if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting(_Options):
    """Of start(). None: what the environment says, else the default."""

    log_every: int | None = _option("steps between two lines of progress", None)
    tensorboard_dir: Any = _option("write there for TensorBoard", None, metavar="DIR")
    sinks: Any = _option(
        "curves go to tensorboard,wandb,mlflow (default: none)", None, metavar="NAMES"
    )
    events: Any = None  # the launcher's command line has it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(_Options):
    """Of prepare(): they belong to the model. Names and meaning are PyTorch's."""

    clip_grad_norm: float | None = _option("bound of the norm of all gradients", None)
    ema: float | None = _option("moving average of the weights, as 0.999", None, metavar="DECAY")
    compile: bool | str = _option(
        "torch.compile; inductor is PyTorch's default", default=False, metavar="BACKEND"
    )
    sync_batchnorm: bool = _option("BatchNorm over all processes (CUDA)", default=False)
    bucket_cap_mb: float | None = _option("size of DDP's gradient buckets", None)
    gradient_as_bucket_view: bool = _option("DDP's option", default=False)
    static_graph: bool = _option("DDP's option", default=False)
    find_unused_parameters: bool = _option("DDP's option", default=False)
    comm_hook: str | None = _option("how gradients travel", None, choices=("bf16", "fp16"))
    grad_scaler: torch.amp.GradScaler | None = None
    comm_hook_options: Mapping[str, Any] | None = None  # none of ours has any

    def check(self) -> None:
        """Raise ConfigError for a value that no model can have."""
        if self.comm_hook == "powersgd" or self.comm_hook_options:
            raise ConfigError(
                "comm_hook='powersgd' and its comm_hook_options are not offered, since runs of it"
                " did not end in equal bits: use comm_hook='bf16' or 'fp16', or leave it out"
            )
        self.check_choices()
        for name in ("clip_grad_norm", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be more than 0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema={self.ema} must be a decay between 0 and 1, as 0.999")
