"""What a run was asked for: the arguments of start() and of prepare(), defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from ddpjob_trainer.data import fetch
from ddpjob_trainer.errors import ConfigError

NAN_POLICIES = ("stop", "skip", "ignore")
TAILS = ("drop", "pad", "join")
PRECISIONS = ("fp32", "bf16", "fp16")
COMM_HOOKS = (None, "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Options:
    """Of start(): they hold for the whole run."""

    total_steps: int
    global_batch: int
    seed: int
    level: str
    threads: int
    collate: fetch.Collate | None
    micro_batches: int = 1
    shards: int = 8  # level elastic: equal parts of the global batch, fixed for the whole run
    tail: str = "drop"
    precision: str = "fp32"
    nan_policy: str = "stop"
    check_every: int = 100  # steps between comparisons of the ranks' parameters, 0: never
    resume: Path | None = None  # a file of weights to begin with, where there is no snapshot

    def check(self, world_size: int) -> None:
        """Raise ConfigError for a value that no run can have."""
        for name in ("total_steps", "global_batch", "micro_batches", "shards"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        choices = {"tail": TAILS, "precision": PRECISIONS, "nan_policy": NAN_POLICIES}
        for name, allowed in choices.items():
            _check_choice(name, getattr(self, name), allowed)
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


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Of prepare(): they belong to the model. Names and meaning are PyTorch's."""

    clip_grad_norm: float | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    ema: float | None = None  # decay
    compile: bool | str = False  # True, or the backend's name
    sync_batchnorm: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    comm_hook: str | None = None
    comm_hook_options: Mapping[str, Any] | None = None  # none of ours has any

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Self:
        """Pick them out of prepare()'s arguments."""
        return cls(**{option.name: given[option.name] for option in fields(cls)})

    def check(self) -> None:
        """Raise ConfigError for a value that no model can have."""
        if self.comm_hook == "powersgd" or self.comm_hook_options:
            raise ConfigError(
                "comm_hook='powersgd' and its comm_hook_options are not offered, since runs of it"
                " did not end in equal bits: use comm_hook='bf16' or 'fp16', or leave it out"
            )
        _check_choice("comm_hook", self.comm_hook, COMM_HOOKS)
        for name in ("clip_grad_norm", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be more than 0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema={self.ema} must be a decay between 0 and 1, as 0.999")


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
