"""When DDP is told to share buffers and to synchronise gradients: by our count, not by its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.data.sampler import DataOrder, Shuffled
from ddpjob_trainer.gradients import determinism
from ddpjob_trainer.gradients.ddp import DdpAveraging
from ddpjob_trainer.options import Options


@pytest.mark.parametrize("models", [1, 2])
def test_buffers_come_from_rank_0_in_the_first_forward_of_each_step_only(models):  # type: ignore[no-untyped-def]
    """DDP's own flag depends on what the forward before was, and hence on a resume."""
    options = Options(
        total_steps=9, global_batch=8, seed=1, level="resume", threads=1, collate=None,
        micro_batches=2,
    )  # fmt: skip
    world: Any = SimpleNamespace(rank=1, size=2)
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


def test_the_warm_up_drops_its_gradients_before_memory_is_taken_for_other_buckets():
    """Else a GPU would hold a second set of them, in pieces that nothing else fits into."""
    held: list[bool] = []
    module = nn.Linear(3, 2)
    module.weight.grad = kept = torch.ones(2, 3)
    reducer = SimpleNamespace(
        _check_reducer_finalized=lambda: None,
        prepare_for_forward=lambda: None,
        _rebuild_buckets=lambda: held.append(any(p.grad is not None for p in module.parameters())),
        prepare_for_backward=lambda _: None,
    )
    model: Any = SimpleNamespace(
        module=module, parameters=module.parameters, reducer=reducer,
        find_unused_parameters=False, static_graph=False,
    )  # fmt: skip
    determinism.warm_up(model, module(torch.ones(1, 3)).sum())
    assert held == [False]
    assert module.weight.grad is kept
    assert module.bias.grad is None
