"""What a run is asked for: the arguments of start() and of prepare(), each declared here, once.

Name, type, default, help and choices: from here the checks have them, and the command line of
`ddpjob-trainer task`. Never imports torch, since the launcher reads that command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_trainer.arguments import Arguments
from ddpjob_trainer.environment import DEFAULT_EVERY_STEPS, DEFAULT_KEEP, MIN_KEEP
from ddpjob_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ddpjob_trainer.data import fetch

#: What start(allow_changes=...) may name: a run that goes on with other data is another run.
CHANGES = ("global_batch", "data", "ema")

Several = str | Sequence[Any]  # names with commas between them, or one by one


def _option(text: str, default: Any = MISSING, **more: Any) -> Any:
    """An option that the command line has, too. ``more``: choices, metavar, least, most."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Arguments):
    """Of start(): they hold for the whole run."""

    total_steps: int | None = _option(
        "optimizer steps of the whole run", None, least=1, required=True
    )
    epochs: int | None = field(default=None, metadata={"least": 1})  # in place of total_steps
    global_batch: int = _option("samples per step, all processes", least=1)
    seed: int = _option("of weights, data order, dropout", 0, least=-(2**63), most=2**64 - 1)
    level: str = _option(
        "bits kept over restarts; on CUDA off, else", "resume", choices=("off", "resume", "elastic")
    )
    device: str = _option(
        "a GPU where the container has one, else the CPU", "auto", choices=("auto", "cuda", "cpu")
    )
    shards: int = _option("equal parts of the global batch at level elastic", 8, least=1)
    micro_batches: int = _option("gradients accumulated per step", 1, least=1)
    tail: str = _option("an epoch's incomplete last batch", "drop", choices=("drop", "pad", "join"))
    precision: str = _option("of the forward", "fp32", choices=("fp32", "bf16", "fp16"))
    nan_policy: str = _option(
        "at a loss or gradient that is not finite", "stop", choices=("stop", "skip", "ignore")
    )
    check_every: int = _option("steps between comparisons of the ranks, 0: never", 100)
    threads: int = _option(
        "torch's threads per process; $OMP_NUM_THREADS, else", 1, least=1, most=1024
    )
    resume: Path | None = _option(
        "weights to begin with, if there is no snapshot yet", None, metavar="FILE"
    )
    resume_hyperparameters: str = _option(
        "whose go on at a resume, of optimizers and schedulers", "snapshot",
        choices=("snapshot", "script"),
    )  # fmt: skip
    collate: fetch.Collate | None = None

    def check(self, world_size: int) -> None:
        """Raise ConfigError for values that so many processes cannot have."""
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
class SnapshotOptions(Arguments):
    """Of start(). None: what the environment says."""

    snapshot_dir: Path | None = _option(
        "default: what the DDPJob says, else none", None, metavar="DIR"
    )
    snapshot_every: int | None = _option(
        f"steps between two snapshots (default: {DEFAULT_EVERY_STEPS})", None, least=1
    )
    snapshot_keep: int | None = _option(
        f"snapshots to keep (default: {DEFAULT_KEEP})", None, least=MIN_KEEP
    )
    snapshot_staging: str = _option(
        "copy the state between steps or beside them", "auto", choices=("auto", "inline", "thread")
    )
    allow_changes: Several = _option(f"of {','.join(CHANGES)}: may be changed", (), metavar="NAMES")
    snapshot_upload: str | None = _option(
        "copy finished ones there, as s3://bucket/job", None, metavar="URL"
    )

    def check(self) -> None:
        """Raise ConfigError for a value that no run can have."""
        odd = self.changes.difference(CHANGES)
        if odd:
            names = ", ".join(CHANGES)
            raise ConfigError(f"allow_changes: {min(odd)!r} must be one of {names}")

    @property
    def changes(self) -> frozenset[str]:
        """Names in allow_changes."""
        given = self.allow_changes
        names = given.split(",") if isinstance(given, str) else given
        return frozenset(str(name).strip() for name in names if str(name).strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting(Arguments):
    """Of start(). None: what the environment says, else the default."""

    log_every: int | None = _option("steps between two lines of progress", None, least=1)
    tensorboard_dir: Path | None = _option("write there for TensorBoard", None, metavar="DIR")
    sinks: Several | None = _option(
        "curves go to tensorboard,wandb,mlflow (default: none)", None, metavar="NAMES"
    )
    events: Path | None = None  # the launcher's command line has it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Arguments):
    """Of prepare(): they belong to the model. Names and meaning are PyTorch's."""

    clip_grad_norm: float | None = _option("bound of the norm of all gradients", None)
    ema: float | None = _option("moving average of the weights, as 0.999", None, metavar="DECAY")
    compile: bool | str = _option(
        "torch.compile; inductor is PyTorch's default", default=False, metavar="BACKEND"
    )
    sync_batchnorm: bool = _option("BatchNorm over all processes (CUDA)", default=False)
    bucket_cap_mb: float | None = _option("size of DDP's gradient buckets", None, most=1e6)
    gradient_as_bucket_view: bool = _option("DDP's option", default=False)
    static_graph: bool = _option("DDP's option", default=False)
    find_unused_parameters: bool = _option("DDP's option", default=False)
    comm_hook: str | None = _option("how gradients travel", None, choices=("bf16", "fp16"))
    grad_scaler: torch.amp.GradScaler | None = None
    comm_hook_options: Mapping[str, Any] | None = None  # none of ours has any

    def check(self) -> None:
        """Raise ConfigError for a value that no model can have."""
        if self.comm_hook_options:
            raise ConfigError(
                "comm_hook_options are powersgd's, which is not offered, since runs of it did not"
                " end in equal bits: use comm_hook='bf16' or 'fp16', or leave it out"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema={self.ema} must be a decay between 0 and 1, as 0.999")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions(Arguments):
    """Of `ddpjob-trainer task` alone."""

    lr: float = _option("of the default optimizer", 1e-3)
    workers: int | None = _option(
        "processes per rank that make batches ahead (default: 0)", None, most=1024
    )
    eval_every: int | None = _option(
        "evaluate every N steps, too (default: at the end only)", None, least=1
    )
    eval_batch: int = _option("samples per evaluation batch", 256, least=1)
