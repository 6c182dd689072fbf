"""What decides a run's result: stored in each snapshot, compared on resume and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.data.dataset_fingerprint import Fingerprint, difference
from ddpjob_trainer.data.inputs import Place
from ddpjob_trainer.data.order import DataOrder, Epochs
from ddpjob_trainer.data.stream import Endless
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import Options
from ddpjob_trainer.snapshot import origin
from ddpjob_trainer.telemetry.console import say

#: What must be equal on all ranks, lest they wait for different things.
OF_ALL = (
    "seed", "global_batch", "micro_batches", "tail", "precision", "samples", "order",
    "total_steps", "level", "shards", "nan_policy", "check_every", "resume",
)  # fmt: skip


def place(options: Options, world: World, alive: Callable[[], None]) -> Place:
    """Return what of the run decides about one rank's batches."""
    shares = options.shards if options.level == "elastic" else world.size
    return Place(
        seed=options.seed,
        rank=world.rank,
        ranks=world.size,
        global_batch=options.global_batch,
        parts=shares * options.micro_batches,
        level=options.level,
        tail=options.tail,
        collate=options.collate,
        accelerator=world.accelerator,
        say=lambda text: say(0, text) if world.rank == 0 else None,
        alive=alive,
    )


def with_steps(options: Options, order: DataOrder) -> Options:
    """Count the steps of start(epochs=...) by the dataset. Raises ConfigError for a stream."""
    if options.epochs is None:
        return options
    if isinstance(order.epochs, Endless):
        raise ConfigError(
            f"epochs={options.epochs}: nobody knows how long an epoch of a stream is; give start()"
            " total_steps instead"
        )
    return replace(options, total_steps=options.epochs * order.steps_per_epoch)


def fingerprint(
    options: Options, world: World, epochs: Epochs, data: Fingerprint | None
) -> dict[str, Any]:
    """Return plain values only: a snapshot's JSON holds them."""
    return {
        "seed": options.seed,
        "global_batch": options.global_batch,
        "micro_batches": options.micro_batches,
        "tail": options.tail,
        "precision": options.precision,
        "samples": epochs.length,
        "order": epochs.name,
        "data": data,
        "total_steps": options.total_steps,
        "level": options.level,
        "shards": options.shards if options.level == "elastic" else None,
        "nan_policy": options.nan_policy,
        "check_every": options.check_every,
        "resume": None if options.resume is None else str(options.resume),
        "threads": options.threads,
        "world_size": world.size,
        "device": world.device.type,
        "accelerator": world.accelerator.facts(),
        "torch": torch.__version__,
        **origin.marks(world.identity),
    }


def take_data(stored: Mapping[str, Any], mine: Fingerprint | None) -> str:
    """Return a warning where the dataset is not the one of the snapshot."""
    what = difference(stored.get("data"), mine)
    return what and (
        f"warning: the dataset is not that of the snapshot, by {what}: the result will not equal an"
        " undisturbed run's. What makes, shuffles or splits it at random belongs after ddp.start(),"
        " which seeds all processes alike, or needs a seed"
    )


def take_layout(config: dict[str, Any], layout: str | None) -> str:
    """Put an Averaging's layout() into the configuration; return a warning if it was another."""
    before, config["buckets"] = config["buckets"], layout
    if before in (None, layout):
        return ""
    what = "travel in other buckets"
    if str(before).partition("/")[0] == str(layout).partition("/")[0]:
        what = "are added up in another order, by other GPUs or over other links,"
    return (
        f"warning: gradients {what} than before the snapshot: the"
        " result will not equal an undisturbed run's bit for bit"
    )


def is_finished(stored: Mapping[str, Any], total_steps: int) -> bool:
    """Tell whether a snapshot is the end of a run that was to do this many steps, or more."""
    found = stored.get("finished")
    return isinstance(found, int) and total_steps <= found
