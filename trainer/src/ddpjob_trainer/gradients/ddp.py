"""Make the gradients equal on all ranks, at levels off and resume. elastic.py: same calls.

The loop begins a step with parts(), which says what this rank computes and in which order, calls
before_forward() and backward() for each part, and finish(), after which every ``.grad`` holds the
mean over the global batch. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.comm.world import OF_DDP, World, holds_group
from ddpjob_trainer.data.order import DataOrder, Indices, share
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Number
from ddpjob_trainer.gradients import determinism
from ddpjob_trainer.gradients.tree_reduce import Gradients, Means, Node
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.state.stateful import SteadyBuffers, persistent_buffers

_DDP_OPTIONS = (
    "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters",
)  # fmt: skip
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class Part:
    """One forward and backward of a step on this rank.

    ``positions``: of its samples in the run, see DataOrder; all parts of all ranks have as many.
    ``shard``: seeds its random numbers, besides seed and step; ``reseed``: they start over at this
    part, not only at the step.
    """

    positions: Indices
    shard: int
    reseed: bool = False


class Wrapped(DistributedDataParallel):
    """DistributedDataParallel that tells the loop of each forward, and of its wait for rank 0.

    A copy of it, or a file, holds a plain DistributedDataParallel. ``on_forward`` gets the wrapper,
    evaluations included; ``waiting`` is entered while this rank waits for rank 0's buffers.
    ``steady``: its buffers that are not persistent, of which caches are not shared.
    """

    on_forward: Callable[[Wrapped], None] | None = None
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    steady: SteadyBuffers | None = None

    def __init__(self, module: torch.nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments)
        self.steady = SteadyBuffers(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the module does."""
        if self.on_forward is not None:
            self.on_forward(self)
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        # torch has no hook there. Without it a hang of rank 0 would be laid to those who wait.
        with self.waiting() if self.waiting is not None else contextlib.nullcontext():
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def _assign_modules_buffers(self) -> None:
        # torch calls it before each wait. Ranks whose caches differ in length would hang in it.
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        if self.steady is not None and self.modules_buffers:
            self.modules_buffers = [
                b for _, b in persistent_buffers(self.module)
            ] + self.steady.tensors()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        own = ("on_forward", "waiting", "steady")
        plain = {name: value for name, value in state.items() if name not in own}
        return object.__new__, (DistributedDataParallel,), plain


@contextlib.contextmanager
def without_effect(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Make a backward in the block give gradients of zero, even from NaN.

    It still runs: DDP waits for every parameter in the graph.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [p.register_hook(_zeros) for p in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(gradient: torch.Tensor | None) -> torch.Tensor | None:
    # None: for an output that the loss leaves out, with find_unused_parameters.
    return None if gradient is None else torch.zeros_like(gradient)


class DdpAveraging:
    """Averages by DistributedDataParallel where it can.

    Gradients of all parts but the last stay on this rank (no_sync) and are sent with the last. What
    the reducer would wait for, or leave on its rank, is sent in finish(): all gradients of several
    models, whose losses may run through one another, and those of a second backward.
    ``outside`` seeds the random numbers that user code draws outside of the parts, besides seed
    and step; ``kept``: the rank whose generators a resume takes; ``samples`` of a step are this
    rank's. ``waits``: the reducer waits for a backward; ``local``: this rank has gradients that are
    not the mean.
    """

    shards: int | None = None  # parts of a step whose number is no matter of the ranks
    in_turn = False  # a batch's forward comes before the next batch is taken
    equal_buffers = False  # on all ranks, at any time

    def __init__(self, options: Options, world: World, *, rescue: bool = False) -> None:
        """Take ``rescue``: see share_buffers()."""
        self._options = options
        self._world = world
        self._rescue = rescue
        self._models: list[DistributedDataParallel] = []
        self._parameters: list[torch.nn.Parameter] = []  # known to the reducer
        self._frozen: list[torch.nn.Parameter] = []  # unknown to it
        self._parts: Sequence[Part] = []
        self.outside = self.kept = world.rank
        self.samples = options.global_batch // world.size
        self._warm = False
        self.waits = False
        self.local = False
        self._means: dict[int, Means] = {}
        self._shared: set[int] = set()  # models whose buffers rank 0 has broadcast in this step

    @property
    def _several(self) -> bool:
        return len(self._models) > 1

    def wrap(self, module: torch.nn.Module, options: ModelOptions) -> Wrapped:
        """Return the module in DistributedDataParallel, with rank 0's parameters and buffers."""
        model = Wrapped(module, **{name: getattr(options, name) for name in _DDP_OPTIONS})
        holds_group(model, *OF_DDP)
        self._models.append(model)
        for parameter in module.parameters():
            (self._parameters if parameter.requires_grad else self._frozen).append(parameter)
        if options.comm_hook is not None:
            # Not PowerSGD: its state differs on every rank, and ended in other bits.
            hook: Any = bf16_compress_hook if options.comm_hook == "bf16" else fp16_compress_hook
            # In a lambda: DDP knows torch's bf16 hook by its name, and refuses it on the CPU.
            model.register_comm_hook(None, lambda _, bucket: hook(None, bucket))
        self._warm = self._options.level == "off"
        return model

    def plan(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Cut this rank's contiguous share into micro-batches. Also called ahead of time."""
        rank, count = self._world.rank, self._options.micro_batches
        mine = share(order.batch(step), rank, self._world.size)
        return [Part(share(mine, number, count), rank) for number in range(count)]

    def parts(self, order: DataOrder, step: int) -> Sequence[Part]:
        """Begin a step; return its plan."""
        self._shared.clear()
        self._parts = self.plan(order, step)
        return self._parts

    def before_forward(self, model: DistributedDataParallel, number: int, *, graph: bool) -> None:
        """Synchronise in the last part's backward only; DDP decides that in the forward.

        ``graph``: a backward may follow.
        """
        # DDP then broadcasts the buffers in this forward, even after one without a graph. In each
        # step, or they would differ after a resume. Not in each forward: a graph that waits for its
        # backward would find its saved tensors changed, and rank 0 may evaluate its model alone.
        first = id(model) not in self._shared
        self._shared.add(id(model))
        if model.require_forward_param_sync != first:
            model.require_forward_param_sync = first
        if not graph:
            return
        last = number >= len(self._parts) - 1 and not self._several
        if model.require_backward_grad_sync != last:  # assigning to a module is slow
            model.require_backward_grad_sync = last
        self.waits |= last

    def backward(
        self, loss: torch.Tensor, number: int, *, weight: float | None, retain_graph: bool = False
    ) -> None:
        """Compute gradients, weighted so that DDP's division by the ranks gives the mean.

        With a ``weight``, which all parts of a step have or none, they lack factor() until then.
        """
        factor = 1 / self._options.micro_batches if weight is None else weight
        if factor != 1.0:
            loss = loss * factor
        awake, self.waits = self.waits, False
        everything = (p for model in self._models for p in model.parameters())
        if not (awake or self._several) and number == len(self._parts) - 1:
            determinism.check_marks(self._models[0])
        effect = without_effect(everything) if weight == 0 else contextlib.nullcontext()
        first = awake and not self._warm
        self._warm |= awake
        warm = determinism.warmed_up(self._models[0], loss) if first else contextlib.nullcontext()
        with effect, determinism.reducer_errors(), warm:
            if first:
                self._world.accelerator.release()
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if awake and not determinism.is_reduced(self._models[0]):
            self._check_frozen()
            raise determinism.unreached(self._models[0])
        self.local = not awake  # else earlier local gradients have been sent, too

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers before the update, with a rescue.

        DDP does so again in the next forward. There rank 0 may have died, and no survivor has them.
        Both are needed: what rank 0 alone changes after commit() counts in that forward, and the
        switch must change no bit.
        """
        if self._rescue and self._world.size > 1:
            for model in self._models:
                if model.modules_buffers:
                    model._sync_buffers()  # type: ignore[no-untyped-call]

    def check_update(self) -> None:
        """Allow updates within a step."""

    def finish(self, groups: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Average the gradients that the reducer left local, which are rare.

        ``groups``: one for each optimizer, the same objects each time.
        """
        if not self._several:
            self._check_frozen()
        if not self.local:
            return
        self.local = False
        if self._world.size > 1:
            for group in groups:
                self._average(group)

    @torch.no_grad()
    def _average(self, group: Sequence[torch.nn.Parameter]) -> None:
        """Replace each gradient by its mean; where a rank has none it counts as zeros.

        Their order is that of the parameters, so none has to be learnt first. The price:
        communication begins only when the last backward has ended.
        """
        ranks, rank = self._world.size, self._world.rank
        if id(group) not in self._means:
            self._means[id(group)] = Means(group, count=ranks, ranks=ranks, rank=rank)
        gradients: Gradients = [parameter.grad for parameter in group]
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            raise ConfigError(
                "sparse gradients cannot be averaged for several models, or after a second"
                " backward: use Embedding(sparse=False)"
            )
        means = self._means[id(group)].mean([(Node(rank, rank + 1), gradients)])
        pairs = []
        for parameter, mean in zip(group, means, strict=True):
            if mean is not None:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                pairs.append((parameter.grad, mean))
        if pairs:
            torch._foreach_copy_([gradient for gradient, _ in pairs], [mean for _, mean in pairs])

    def _check_frozen(self) -> None:
        """Raise ConfigError for a changed requires_grad.

        The reducer waits for a parameter frozen after prepare(), and ignores one unfrozen since.
        """
        frozen = not all(map(_REQUIRES_GRAD, self._parameters))
        if frozen or any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError(
                "requires_grad of a parameter was changed after prepare(): DDP cannot follow that"
                " within one model. Freeze before prepare(), or give it the parts as models of"
                " their own, not yet frozen: run.prepare([first, second], [its_optimizer,"
                " other_optimizer]); then freeze and unfreeze one in the loop"
            )

    def losses(self, values: Sequence[Number], weights: Sequence[float]) -> list[Number]:
        """Return one number per rank to add up over all. With zeros that is exact in any order.

        ``weights``: empty where samples weigh equally.
        """
        slots: list[Number] = [0.0] * self._world.size
        each = weights or [len(part.positions) for part in self._parts]
        # A part of weight 0 may have any loss: NaN times 0 is NaN.
        total = sum(n * value for n, value in zip(each, values, strict=True) if n)
        slots[self._world.rank] = total if weights else total / self._options.global_batch
        return slots

    def weights(self, weights: Sequence[float]) -> list[float]:
        """Return one number per rank, as many with weights as without."""
        slots = [0.0] * self._world.size
        slots[self._world.rank] = float(sum(weights))
        return slots

    def mean_loss(self, losses: Sequence[float], weights: Sequence[float] | None = None) -> float:
        """Return the step's loss from those sums, in the order of the ranks."""
        return sum(losses) / (sum(weights) or math.nan if weights is not None else 1.0)

    def factor(self, weights: Sequence[float]) -> float:
        """Return the factor that undoes DDP's division; not finite where weights add up to 0."""
        return self._world.size / (sum(weights) or math.nan)

    def layout(self) -> str | None:
        """Hash which gradients are sent together, known after the first backward."""
        if self._options.level == "off":
            return None
        if self._several:
            return "in the order of the parameters"
        if not self._warm:
            return None
        layout = determinism.bucket_layout(self._models[0])
        if self._world.accelerator.queues and self._world.size > 1:
            layout += f"/{determinism.order_of_sums(self._models[0], self._world.rank)}"
        return layout
