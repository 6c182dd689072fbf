"""Average at level elastic: the same bits at any number of ranks.

The loop calls it as it does ddp.DdpAveraging. The global batch is cut into logical shards, fixed in
number for the whole run. A rank computes its contiguous share of them one by one, each with its own
random numbers and the same shapes, whichever rank computes it; DDP's reducer is never used. The
shards' gradients and losses are added up in one tree (tree_reduce.py), independent of ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.comm.world import OF_DDP, World, holds_group
from ddpjob_trainer.data import generators
from ddpjob_trainer.data.order import DataOrder, share
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Number
from ddpjob_trainer.gradients import tree_reduce
from ddpjob_trainer.gradients.ddp import DdpAveraging, Part, Wrapped, without_effect
from ddpjob_trainer.gradients.tree_reduce import Gradients, Means, Partial, add_gradients
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.state import stateful

N = TypeVar("N", float, Number)


class ElasticAveraging:
    """One rank's side of the averaging protocol."""

    in_turn = True  # each batch draws its random numbers apart
    equal_buffers = True  # no forward may change them
    kept = 0  # all ranks' generators are equal, and there may have been fewer of them

    def __init__(self, options: Options, world: World) -> None:
        self._options = options
        self._world = world
        self.shards = options.shards
        owned = tree_reduce.owned(self.shards, world.size, world.rank)
        self.samples = len(owned) * options.global_batch // self.shards
        #: Random numbers outside of the shards depend on this: equal on all ranks.
        self.outside = self.shards
        self.waits = False  # no rank waits before finish()
        self.local = True  # until then
        self._partial: Partial[Gradients] = Partial(self.shards, add_gradients)
        self._shard: int | None = None  # the shard whose gradients the parameters hold now
        self._parameters: list[torch.nn.Parameter] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._parts: Sequence[Part] = []
        self._step = 0

    def wrap(self, module: torch.nn.Module, options: ModelOptions) -> Wrapped:
        """Return the module in DistributedDataParallel, whose reducer stays idle.

        Raises ConfigError for modules whose result depends on the order of the shards.
        """
        _refuse(module)
        model = Wrapped(module)  # gives every rank rank 0's parameters and buffers
        # Free DDP's reducer, whose idle buckets are as large as the gradients.
        setattr(model, "logger", None)  # noqa: B010 - it holds the reducer
        setattr(model, "reducer", _NoReducer())  # noqa: B010
        holds_group(model, *OF_DDP)
        model.require_backward_grad_sync = False  # as no_sync() does for a while
        model.require_forward_param_sync = False
        module.zero_grad(set_to_none=True)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._buffers = BufferWatch(module)
        ranks, rank = self._world.size, self._world.rank
        self._means = Means(self._parameters, count=self.shards, ranks=ranks, rank=rank)
        return model

    def plan(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Return this rank's shards, each cut into micro-batches."""
        parts: list[Part] = []
        for shard in tree_reduce.owned(self.shards, self._world.size, self._world.rank):
            mine = share(order.batch(step), shard, self.shards)
            size = len(mine) // self._options.micro_batches
            parts += [
                Part(mine[start : start + size], shard, reseed=start == 0)
                for start in range(0, len(mine), size)
            ]
        return parts

    def parts(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Begin a step."""
        self._step = step
        self._parts = self.plan(order, step)
        return self._parts

    def before_forward(self, model: DistributedDataParallel, number: int, *, graph: bool) -> None:
        """Record the buffers, which this forward must not change."""
        if graph:
            self._buffers.remember(number)

    def backward(
        self, loss: torch.Tensor, number: int, *, weight: float | None, retain_graph: bool = False
    ) -> None:
        """Compute a part's gradients; add the finished shard before it to the tree."""
        micro, shard = self._options.micro_batches, self._parts[number].shard
        if shard != self._shard:
            self._end_shard()
            self._shard = shard
        scaled = loss if micro == 1 else loss / micro
        if weight is not None:
            scaled = loss * weight
        with without_effect(self._parameters) if weight == 0 else contextlib.nullcontext():
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._buffers.check()

    def _end_shard(self) -> None:
        if self._shard is None:
            return
        gradients: Gradients = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    "level='elastic' cannot average sparse gradients: use"
                    " Embedding(sparse=False), or level='resume'"
                )
            gradients.append(gradient)
            parameter.grad = None  # each shard starts from none
        self._partial.push(self._shard, gradients)
        self._shard = None

    def share_buffers(self) -> None:
        """Do nothing: they are equal on all ranks."""

    def check_update(self) -> None:
        """Refuse updates within a step. Raises ConfigError."""
        raise ConfigError(
            "level='elastic' adds the shards' gradients up once per step: update with"
            " step.commit() only, or use level='resume'"
        )

    def finish(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Average over all shards, whatever the groups."""
        self._end_shard()
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError(
                "a parameter that was frozen when prepare() was called has a gradient: level"
                "='elastic' averages those that were not. Set requires_grad before prepare()"
            )
        means = self._means.mean(self._partial.take())
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.grad = mean
            if mean is not None and mean.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(mean)
        # Later random numbers must not depend on which shard this rank computed last.
        generators.reseed(self._options.seed, self._step, self.shards + 1)

    def losses(self, values: Sequence[Number], weights: Sequence[float]) -> list[Number]:
        """Return one number per shard: adding zeros to it is exact in any order."""
        if weights:
            pairs = zip(values, weights, strict=True)
            return self._by_shard([w * value if w else 0.0 for value, w in pairs])
        return [total / self._options.micro_batches for total in self._by_shard(values)]

    def weights(self, weights: Sequence[float]) -> list[float]:
        """Return one number per shard."""
        return self._by_shard(weights)

    def _by_shard(self, values: Sequence[N]) -> list[N]:
        slots: list[Any] = [0.0] * self.shards
        for part, value in zip(self._parts, values, strict=False):  # there may be no values
            slots[part.shard] += value
        return slots

    def mean_loss(self, losses: Sequence[float], weights: Sequence[float] | None = None) -> float:
        """Add up in the order of the tree."""
        if weights is None:
            return tree_reduce.total(losses) / self.shards
        return tree_reduce.total(losses) / (tree_reduce.total(weights) or math.nan)

    def factor(self, weights: Sequence[float]) -> float:
        """Return the factor that undoes the mean over the shards."""
        return self.shards / (tree_reduce.total(weights) or math.nan)

    def layout(self) -> str | None:
        """Return None: the number of shards alone decides the order of additions."""
        return None


class _NoReducer:
    """The part of the reducer that DDP's forward still calls."""

    def _rebuild_buckets(self) -> bool:
        return False


def _refuse(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) or (
            isinstance(part, _NormBase) and part.track_running_stats
        ):
            raise ConfigError(
                f"level='elastic' cannot keep the running statistics of {name or 'the model'}"
                f" ({type(part).__name__}), which depend on the order of the shards: use GroupNorm"
                " or LayerNorm, or level='resume'"
            )


class BufferWatch:
    """Finds a forward that changes a buffer, which would then differ between ranks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [one for one in stateful.buffer_slots(module) if one.is_persistent]
        self._number = -1
        self._before: list[tuple[Any, int]] = []

    def _now(self) -> list[tuple[Any, int]]:
        found = [place.get() for place in self._places]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in found]

    def remember(self, number: int) -> None:
        """Record the buffers at the first forward of a part."""
        if self._places and number != self._number:
            self._number = number
            self._before = self._now()

    def check(self) -> None:
        """Raise ConfigError when a buffer has been changed since."""
        self._number = -1
        if not self._places:
            return
        for place, before, now in zip(self._places, self._before, self._now(), strict=True):
            if before[0] is not now[0] or before[1] != now[1]:
                raise ConfigError(
                    f"level='elastic': the forward changes the buffer {place.name!r}, so the result"
                    " would depend on the number of ranks: change it once per step, after"
                    " step.commit(), or use level='resume'"
                )


Averaging = DdpAveraging | ElasticAveraging
