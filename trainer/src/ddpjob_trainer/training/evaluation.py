"""Evaluation: every sample once, shared among the ranks, and training notices nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.data import fetch
from ddpjob_trainer.state import buffers, rng

Metric = Callable[[torch.nn.Module, Any], torch.Tensor | float]


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the module in eval mode, without gradients; put modes and generators back."""
    modes = [(part, part.training) for part in module.modules()]  # some may be frozen
    module.eval()
    try:
        with torch.no_grad(), rng.preserved():
            yield module
    finally:
        for part, training in modes:
            part.training = training


def share_buffers(module: torch.nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers: each rank's BatchNorm has seen other samples."""
    for _, buffer in buffers.persistent(module):
        world.broadcast_tensor(buffer)


def share_of_metric(
    module: torch.nn.Module,
    dataset: fetch.Dataset,
    metric: Metric,
    world: World,
    *,
    batch_size: int,
    collate: fetch.Collate | None,
    alive: Callable[[], None],
) -> float:
    """Return the sum of the metric over this rank's batches. ``alive`` is called for each."""
    total = 0.0
    for start in range(world.rank * batch_size, len(dataset), world.size * batch_size):
        alive()
        indices = fetch.span(start, min(start + batch_size, len(dataset)))
        batch = fetch.fetch(dataset, indices, collate)
        total += float(metric(module, fetch.to_device(batch, world.device)))
    return total
