"""How the gradients become equal on all ranks.

run.py knows only the protocol: which samples this rank computes and in which order, a backward
for each, and finish(), after which every ``.grad`` holds the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer import exact
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.order import DataOrder, Indices
from ddpjob_trainer.world import World


@dataclass(frozen=True, slots=True)
class Part:
    """One forward and backward of a step on this rank.

    ``samples`` count in the step's mean, out of ``of`` over all parts of all ranks. ``shard`` is
    what its random numbers depend on, besides seed and step; ``reseed``: they begin anew at this
    part, not only at the step.
    """

    indices: Indices
    samples: int
    of: int
    shard: int
    reseed: bool = False


class Averaging(Protocol):
    """One process's side. Every rank makes the same calls in the same order.

    ``outside``: what random numbers that user code draws outside of the parts depend on, besides
    seed and step.
    """

    outside: int

    def wrap(self, module: torch.nn.Module, options: ModelOptions) -> DistributedDataParallel:
        """Return the module that the loop calls. Called once, before the loop."""
        ...

    def parts(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Begin a step: return what this rank computes in it, at least one part."""
        ...

    def before_forward(self, number: int) -> None:
        """The forward of part ``number`` of this step begins."""
        ...

    def backward(self, loss: torch.Tensor, number: int) -> None:
        """Compute the gradients of part ``number`` from its mean loss."""
        ...

    def finish(self) -> None:
        """After the last backward: every ``.grad`` now holds the mean, equal on all ranks."""
        ...

    def losses(self, values: Sequence[float]) -> list[float]:
        """Numbers to add up over all ranks, from the parts' losses on this one."""
        ...

    def mean_loss(self, summed: Sequence[float]) -> float:
        """The step's loss, from those sums; equal on all ranks."""
        ...

    def layout(self) -> str | None:
        """Hash of what else decides the order of additions; None: nothing, or not yet known."""
        ...


def check_sizes(options: Options, world_size: int) -> None:
    """Raise ConfigError for a global batch that the processes cannot share."""
    for name in ("total_steps", "global_batch", "micro_batches", "shards"):
        value = getattr(options, name)
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    count, sharers = world_size, f"{world_size} processes"
    if options.level == "elastic":
        count, sharers = options.shards, f"shards={options.shards}"
        if world_size > count:
            raise ConfigError(
                f"level='elastic' with shards={count} can use at most {count} processes, not"
                f" {world_size}: use fewer, or start anew with more shards"
            )
    if options.global_batch % count:
        raise ConfigError(
            f"global_batch={options.global_batch} cannot be divided by {sharers}: use"
            f" a multiple of {count}"
        )
    if options.global_batch % (count * options.micro_batches):
        raise ConfigError(
            f"global_batch={options.global_batch} cannot be divided by {sharers} x"
            f" micro_batches={options.micro_batches}: use a multiple of"
            f" {count * options.micro_batches}"
        )


class DdpAveraging:
    """DistributedDataParallel as it is: levels off and resume.

    Gradients of all parts but the last stay on this rank (no_sync) and travel with the last.
    """

    def __init__(self, options: Options, world: World) -> None:
        self._options = options
        self._world = world
        self.outside = world.rank
        self._model: DistributedDataParallel | None = None
        self._parts: list[Part] = []
        self._warm = options.level == "off"

    @property
    def _wrapped(self) -> DistributedDataParallel:
        assert self._model is not None, "wrap() comes first"
        return self._model

    def wrap(self, module: torch.nn.Module, options: ModelOptions) -> DistributedDataParallel:
        """Return the module in DistributedDataParallel, with rank 0's parameters and buffers."""
        self._model = DistributedDataParallel(module, bucket_cap_mb=options.bucket_cap_mb)
        return self._model

    def parts(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Cut this rank's contiguous share into equal parts."""
        rank, count = self._world.rank, self._options.micro_batches
        share = order.shard(step, rank, self._world.size)
        size = len(share) // count
        whole = len(share) * self._world.size
        self._parts = [
            Part(share[start : start + size], size, whole, rank)
            for start in range(0, len(share), size)
        ]
        return self._parts

    def before_forward(self, number: int) -> None:
        """Synchronise in the last backward only; DDP decides that in the forward."""
        self._wrapped.require_backward_grad_sync = number >= len(self._parts) - 1

    def backward(self, loss: torch.Tensor, number: int) -> None:
        """DDP divides by the number of processes: the rest of the weight is ours."""
        part = self._parts[number]
        factor = part.samples * self._world.size / part.of
        if factor != 1.0:
            loss = loss * factor
        if not self._warm and number == len(self._parts) - 1:
            exact.warm_up(self._wrapped, loss)
            self._warm = True
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Nothing is left to do: the last backward has waited for all buckets."""

    def losses(self, values: Sequence[float]) -> list[float]:
        """One number per rank: gloo adds up in the same order every time."""
        pairs = zip(self._parts, values, strict=True)
        return [sum(part.samples * value for part, value in pairs)]

    def mean_loss(self, summed: Sequence[float]) -> float:
        """Divide by the samples of the step."""
        return summed[0] / self._parts[0].of

    def layout(self) -> str | None:
        """Which gradients travel together: known once the first backward has shown their order."""
        if self._options.level == "off" or not self._warm:
            return None
        return exact.bucket_layout(self._wrapped)
