"""Which gradients may be applied."""

import itertools
import math

import pytest
import torch
from torch import nn

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.optim import nan_policy
from ddpjob_trainer.optim.nan_policy import NanPolicy

BAD = (math.inf, -math.inf, math.nan)
POLICY = NanPolicy("stop", World(0, 1, torch.device("cpu"), None, None, None))  # type: ignore[arg-type]


def allows(*gradients: torch.Tensor | None, norm: float | None = None) -> bool:
    parameters = []
    for gradient in gradients:
        like = torch.zeros(3) if gradient is None else torch.zeros_like(gradient)
        parameters.append(nn.Parameter(like))
        parameters[-1].grad = gradient
    known = None if norm is None else torch.tensor(norm)
    return POLICY.allows(parameters, known)


def test_in_every_place_of_each_dtype():
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64
    for place, dtype in itertools.product(range(4), dtypes):
        gradients = [torch.ones(5, dtype=(torch.float32, dtype)[i % 2]) for i in range(4)]
        assert allows(None, *gradients)
        for value in BAD:
            gradients[place][4] = value
            assert not allows(None, *gradients)


def test_layouts():
    for value in (1.0, *BAD):
        fine = value == 1.0
        assert allows(torch.full((4, 6), value).t()[::2]) == fine
        assert allows(torch.tensor([value]).expand(5)) == fine  # many elements in one place
        sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, value], (3,), check_invariants=True)
        assert allows(sparse) == fine
    assert allows(torch.ones(0))
    assert allows(None)


def test_squares_that_overflow_are_no_reason():
    assert allows(torch.full((5,), 1e30))
    assert allows(torch.full((5,), 1e30), norm=math.inf)
    assert allows(torch.ones(5), norm=1.0)
    for value in BAD:
        assert not allows(torch.tensor([1.0, value]), norm=value)


def test_one_call_for_all_whatever_the_default_dtype(monkeypatch):
    monkeypatch.setattr(nan_policy, "_finite", lambda _: pytest.fail("one call per tensor"))
    torch.set_default_dtype(torch.float64)
    try:
        assert allows(torch.ones(3), torch.ones(4))
    finally:
        torch.set_default_dtype(torch.float32)
