"""Refuse options that do not go together: one table, which names both and the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions, Options


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the table looks at."""

    options: Options
    model: ModelOptions
    device: str  # cpu, cuda
    has_sync_batchnorm: bool = False
    several_models: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """``first`` and ``second`` do not go together ``when`` it holds."""

    first: str
    second: str
    when: Callable[[Facts], bool]
    reason: str
    cure: str


def _elastic(facts: Facts) -> bool:
    return facts.options.level == "elastic"


REFUSALS = (
    Refusal(
        "comm_hook",
        "level='elastic'",
        lambda f: _elastic(f) and f.model.comm_hook is not None,
        "elastic adds gradients up in an order of its own, past DDP's buckets and their hooks",
        "Use comm_hook=None, or level='resume'",
    ),
    Refusal(
        "static_graph=True",
        "level='elastic'",
        lambda f: _elastic(f) and f.model.static_graph,
        "elastic never lets DDP synchronise, so DDP would never see the graph it is to keep",
        "Use static_graph=False, or level='resume'",
    ),
    Refusal(
        "static_graph=True",
        "micro_batches",
        lambda f: f.model.static_graph and f.options.micro_batches > 1,
        "DDP must see the graph in a backward that it synchronises, and the first would not be",
        "Use static_graph=False, or micro_batches=1",
    ),
    Refusal(
        "SyncBatchNorm",
        "level='elastic'",
        lambda f: _elastic(f) and (f.model.sync_batchnorm or f.has_sync_batchnorm),
        "its statistics depend on how many processes there are",
        "Use GroupNorm or LayerNorm, or level='resume'",
    ),
    Refusal(
        "SyncBatchNorm",
        "training on the CPU",
        lambda f: f.device == "cpu" and (f.model.sync_batchnorm or f.has_sync_batchnorm),
        "PyTorch has it for CUDA only",
        "Use sync_batchnorm=False and BatchNorm, or GroupNorm",
    ),
    Refusal(
        "several models",
        "level='elastic'",
        lambda f: _elastic(f) and f.several_models,
        "their losses run through one another, past the order in which shards are added up",
        "Use level='resume', or one model",
    ),
    Refusal(
        "several models",
        "comm_hook or static_graph",
        lambda f: f.several_models and (f.model.comm_hook is not None or f.model.static_graph),
        "their gradients are averaged after backward, past DDP's buckets, hooks and graph",
        "Use comm_hook=None and static_graph=False, or one model",
    ),
    Refusal(
        "grad_scaler",
        "a precision other than 'fp16'",
        lambda f: f.model.grad_scaler is not None and f.options.precision != "fp16",
        "only fp16's small range needs one",
        "Use grad_scaler=None, or precision='fp16'",
    ),
)


def refuse(facts: Facts) -> None:
    """Raise ConfigError for the first combination in the table that is asked for."""
    for refusal in REFUSALS:
        if refusal.when(facts):
            raise ConfigError(
                f"{refusal.first} and {refusal.second} do not go together: {refusal.reason}."
                f" {refusal.cure}"
            )
