"""Gradients that the loop changes before they are the mean: which loops that makes wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.training.models.guard import Touched


class Watched:
    """A model whose gradients are still this rank's own after each backward."""

    def __init__(self, *, local: bool = True, scaler: torch.amp.GradScaler | None = None) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.updater = Updater()
        self.updater.scaler = scaler
        self.updater.units.append(Unit(self.optimizer, None, Clip(None, [])))
        self.updater.trains(dict(self.model.named_parameters()))
        averaging: Any = SimpleNamespace(local=local)
        self.touched = Touched(averaging, self.updater)

    def backward(self, number: int, *, weighted: bool = False) -> None:
        self.touched.before_backward(number)
        self.updater.scale(self.model(torch.ones(1, 2)).sum()).backward()
        self.touched.after_backward(weighted=weighted)

    def update(self) -> None:
        self.touched.before_update(self.updater.units)


def clip(watched: Watched) -> None:
    nn.utils.clip_grad_norm_(watched.model.parameters(), 0.1)


def replace(watched: Watched) -> None:
    watched.model.weight.grad = torch.ones(2, 2)


def drop(watched: Watched) -> None:
    watched.optimizer.zero_grad()


def zero(watched: Watched) -> None:
    watched.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("change", [clip, replace, drop, zero])
def test_what_is_changed_too_early_is_refused(change: Callable[[Watched], None]) -> None:
    watched = Watched()
    watched.backward(0)
    change(watched)
    with pytest.raises(ConfigError, match=r"between two batches of a step.*leave optimizer\.zero"):
        watched.backward(1)
    if change is not drop:
        with pytest.raises(ConfigError, match=r"after step\.backward.*clip_grad_norm=.*before_up"):
            watched.update()


def test_gradients_that_another_backward_has_left_are_refused() -> None:
    watched = Watched()
    watched.backward(0)
    watched.backward(1)
    watched.update()
    watched.updater.forget()
    watched.touched.before_backward(0, first=True)
    watched.model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"before the first step\.backward\(\) since the last up"):
        watched.touched.before_backward(0, first=True)


def test_between_two_losses_of_a_batch_the_gradients_of_one_model_may_be_dropped() -> None:
    """As a GAN drops what the generator's loss has left in the discriminator."""
    watched = Watched()
    for _ in range(3):
        watched.backward(0)
        drop(watched)
        watched.backward(0)
        watched.update()
        drop(watched)


def test_a_mean_may_be_clipped_unless_it_lacks_the_factor_of_the_weights() -> None:
    watched = Watched(local=False)
    for weighted in (False, True):
        watched.backward(0, weighted=weighted)
        clip(watched)
        if not weighted:
            watched.update()
    with pytest.raises(ConfigError, match="were not yet the mean"):
        watched.update()


def test_scaled_gradients_may_be_clipped_once_the_script_has_unscaled_them() -> None:
    watched = Watched(local=False, scaler=torch.amp.GradScaler("cpu"))
    for unscaled in (True, False):
        watched.backward(0)
        assert watched.updater.scaler is not None
        if unscaled:
            watched.updater.scaler.unscale_(watched.optimizer)
        clip(watched)
        if unscaled:
            watched.update()
            watched.updater.update(watched.updater.units)
    with pytest.raises(ConfigError, match="were not yet the mean"):
        watched.update()
