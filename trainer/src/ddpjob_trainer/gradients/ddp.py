"""How the gradients become equal on all ranks.

run.py knows only the protocol: which samples this rank computes and in which order, a backward
for each, and finish(), after which every ``.grad`` holds the mean over the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.comm.teardown import holds_ddp
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.data.permutation import Indices
from ddpjob_trainer.data.sampler import DataOrder, share
from ddpjob_trainer.gradients import determinism
from ddpjob_trainer.gradients.comm_hooks import compress
from ddpjob_trainer.options import ModelOptions, Options


@dataclass(frozen=True, slots=True)
class Part:
    """One forward and backward of a step on this rank.

    ``positions``: of its samples in the run, see DataOrder. ``samples`` count in the step's mean,
    out of ``of`` over all parts of all ranks; 0 when no sample is left for this one, which then
    computes only to keep the others company. ``shard`` is what its random numbers depend on,
    besides seed and step; ``reseed``: they begin anew at this part, not only at the step.
    """

    positions: Indices
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


def ddp_arguments(options: ModelOptions) -> dict[str, Any]:
    """The options that are DistributedDataParallel's own."""
    names = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    return {name: getattr(options, name) for name in names}


@contextlib.contextmanager
def _without_effect(module: torch.nn.Module) -> Iterator[None]:
    """Within, a backward gives gradients of zero: 0 times what is no number would be none either.

    It still runs: DDP waits for every parameter that the graph holds.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_hook(torch.zeros_like) for p in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class DdpAveraging:
    """DistributedDataParallel as it is: levels off and resume.

    Gradients of all parts but the last stay on this rank (no_sync) and travel with the last.
    """

    def __init__(self, options: Options, world: World) -> None:
        self._options = options
        self._world = world
        self._model: DistributedDataParallel | None = None
        self._parts: list[Part] = []
        self.outside = world.rank
        self._warm = False

    @property
    def _wrapped(self) -> DistributedDataParallel:
        assert self._model is not None, "wrap() comes first"
        return self._model

    def wrap(self, module: torch.nn.Module, options: ModelOptions) -> DistributedDataParallel:
        """Return the module in DistributedDataParallel, with rank 0's parameters and buffers."""
        self._model = DistributedDataParallel(module, **ddp_arguments(options))
        holds_ddp(self._model)
        compress(self._model, options)
        self._warm = self._options.level == "off"
        return self._model

    def parts(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Cut this rank's contiguous share into parts that differ by at most one sample."""
        rank, count = self._world.rank, self._options.micro_batches
        batch = order.batch(step)
        mine = share(batch, rank, self._world.size)
        self._parts = []
        for number in range(count):
            part = share(mine, number, count)
            positions = part if len(part) else batch[:1]
            self._parts.append(Part(positions, len(part), len(batch), rank))
        return self._parts

    def before_forward(self, number: int) -> None:
        """Synchronise in the last backward only; DDP decides that in the forward."""
        last = number >= len(self._parts) - 1
        if self._wrapped.require_backward_grad_sync != last:  # assigning to a module is slow
            self._wrapped.require_backward_grad_sync = last

    def backward(self, loss: torch.Tensor, number: int) -> None:
        """DDP divides by the number of processes: the rest of the weight is ours."""
        part = self._parts[number]
        factor = part.samples * self._world.size / part.of
        if factor != 1.0:
            loss = loss * factor
        with contextlib.nullcontext() if part.samples else _without_effect(self._wrapped.module):
            if not self._warm and number == len(self._parts) - 1:
                self._warm = True
                determinism.warm_up(self._wrapped, loss)
            loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Nothing is left to do: the last backward has waited for all buckets."""

    def losses(self, values: Sequence[float]) -> list[float]:
        """One number per rank: adding zeros to it is exact, wherever it stands in a message."""
        pairs = zip(self._parts, values, strict=True)
        slots = [0.0] * self._world.size
        # Without a sample its loss may be anything, also what times 0 is no number.
        total = sum(part.samples * value for part, value in pairs if part.samples)
        slots[self._world.rank] = total / self._parts[0].of
        return slots

    def mean_loss(self, summed: Sequence[float]) -> float:
        """Add up in the order of the ranks."""
        return sum(summed)

    def layout(self) -> str | None:
        """Which gradients travel together: known once the first backward has shown their order."""
        if self._options.level == "off" or not self._warm:
            return None
        return determinism.bucket_layout(self._wrapped)
