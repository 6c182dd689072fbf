"""When DDP is told to share buffers and to synchronise gradients: by our count, not by its own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.data.order import DataOrder, Shuffled
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients import determinism
from ddpjob_trainer.gradients.ddp import DdpAveraging, without_effect


@pytest.mark.parametrize("models", [1, 2])
def test_buffers_come_from_rank_0_in_the_first_forward_of_each_step_only(models):
    """DDP's own flag depends on what the forward before was, and hence on a resume."""
    world: Any = SimpleNamespace(rank=1, size=2)
    options: Any = SimpleNamespace(micro_batches=2, global_batch=8)
    averaging = DdpAveraging(options, world)
    several: list[Any] = [
        SimpleNamespace(require_forward_param_sync=True, require_backward_grad_sync=True)
        for _ in range(models)
    ]
    averaging._models = several
    order = DataOrder(Shuffled(1, 80), 8, "drop")
    for step in range(3):
        averaging.parts(order, step)
        shared = []
        for number, graph in ((0, False), (0, True), (1, True), (1, True), (1, False)):
            for model in several:
                averaging.before_forward(model, number, graph=graph)
                shared.append(model.require_forward_param_sync)
                # As DDP's forward leaves it.
                model.require_forward_param_sync = graph and model.require_backward_grad_sync
        assert shared == [True] * models + [False] * 4 * models


def idle(module: nn.Module, rebuild: Callable[[], object] = lambda: None) -> Any:
    reducer = SimpleNamespace(
        _check_reducer_finalized=lambda: None,
        prepare_for_forward=lambda: None,
        _rebuild_buckets=rebuild,
        prepare_for_backward=lambda _: None,
    )
    return SimpleNamespace(
        module=module, parameters=module.parameters, reducer=reducer,
        find_unused_parameters=False, static_graph=False,
    )  # fmt: skip


def test_the_warm_up_drops_its_gradients_before_new_buckets_take_memory():
    """Else a GPU would hold a second set of them, in pieces that nothing else fits into."""
    held: list[bool] = []
    module = nn.Linear(3, 2)
    module.weight.grad = kept = torch.ones(2, 3)
    model = idle(module, lambda: held.append(any(p.grad is not None for p in module.parameters())))
    determinism.warm_up(model, module(torch.ones(1, 3)).sum())
    assert held == [False]
    assert module.weight.grad is kept
    assert module.bias.grad is None


class Fused(torch.autograd.Function):
    """A loss whose gradient is made in forward, as fused ones do; scaled where it lies, or not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.gradient, ctx.in_place = x * 2, in_place
        return x.pow(2).sum()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        if ctx.in_place:
            return ctx.gradient.mul_(given), None
        return ctx.gradient * given, None


class Sink(torch.autograd.Function):
    """Around a model's outputs, as DDP's: one that no loss reaches hands no gradient on."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients


@pytest.mark.parametrize("factor", [0.5, -1.0, 3.0])
def test_a_backward_that_gives_other_gradients_the_second_time_is_refused(factor):
    module = nn.Linear(3, 2)
    loss = Fused.apply(module(torch.arange(6.0).view(2, 3)), True) * factor
    with (
        pytest.raises(ConfigError, match=r"gave '(weight|bias)' another gradient"),
        determinism.warmed_up(idle(module), loss),
    ):
        loss.backward()
    assert module.weight.grad is not None
    assert not module.weight._backward_hooks


@pytest.mark.parametrize(
    "factor", [0.5, 0.0, float("nan"), float("inf"), 1e30], ids=lambda factor: f"{factor:g}"
)
def test_backwards_that_give_the_same_twice_pass(factor):
    module = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 2),
            "short": nn.Linear(2, 2, dtype=torch.bfloat16),
            "sparse": nn.Embedding(5, 3, sparse=True),
            "unused": nn.Linear(1, 1),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
        }
    )
    module["linear"].register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    module["linear"].register_parameter("empty", nn.Parameter(torch.ones(0, 2)))
    x = module["linear"](module["sparse"](torch.tensor([1, 1, 4])))
    x = (x * module["linear"].turn.conj()).abs() + module["linear"].empty.sum()
    x = module["frozen"](module["short"](x.bfloat16()).float())
    x, _ = Sink.apply(x, module["unused"](torch.ones(1)))
    loss = Fused.apply(x, False) * factor
    with determinism.warmed_up(idle(module), loss):
        loss.backward()


def test_what_the_order_of_additions_makes_of_zero_is_no_other_gradient():
    for first, second, expected in (
        ([-3e-7, 1e-7], [2e-7, 5e-7], None),
        ([-3e-3, 1e-3], [-6e-3, 2e-3], "weight"),
        ([-1.0, 2.0], [-1.003, 2.004], None),
    ):
        made = [{"": torch.ones(2), "weight": torch.tensor(one)} for one in (first, second)]
        assert determinism._different(*made) == expected


def test_a_batch_that_counts_for_nothing_may_leave_an_output_out():
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    x, _ = Sink.apply(used(torch.ones(1, 2)), unused(torch.ones(1, 2)))
    with without_effect([*used.parameters(), *unused.parameters()]):
        (x * float("nan")).sum().backward()
    assert not used.weight.grad.any()
    assert unused.weight.grad is None
