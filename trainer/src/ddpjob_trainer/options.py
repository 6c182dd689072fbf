"""What a run was asked for: the arguments of start() and of prepare(), defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_trainer import batches


@dataclass(frozen=True, slots=True)
class Options:
    """Of start(): they hold for the whole run."""

    total_steps: int
    global_batch: int
    seed: int
    level: str
    threads: int
    collate: batches.Collate | None
    micro_batches: int = 1
    shards: int = 8  # level elastic: equal parts of the global batch, fixed for the whole run


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Of prepare(): they belong to the model. Names and meaning are PyTorch's."""

    clip_grad_norm: float | None = None
    bucket_cap_mb: float | None = None
