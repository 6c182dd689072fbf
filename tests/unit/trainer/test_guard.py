"""What trains wrongly without any restart is refused, with the cure; all else is let be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.models.guard import Guard

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # no update precedes

MODEL = torch.nn.Linear(2, 2)


class Watched:
    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD(MODEL.parameters(), lr=1.0)
        self.state = TrainingState(MODEL)
        self.updater = Updater()
        self.guard = Guard(self.state, self.updater)

    def begin(self, scheduler: Any = None) -> None:
        self.updater.units.append(Unit(self.optimizer, scheduler, Clip(None, [])))
        self.updater.trains(dict(MODEL.named_parameters()))
        self.guard.scheduled()

    def update(self) -> None:
        self.guard.check_schedulers()
        assert self.updater.update(self.updater.units)
        self.guard.scheduled()


@pytest.fixture
def watched() -> Iterator[Watched]:
    methods = lr_scheduler.LRScheduler.step, torch.optim.Optimizer.__init__
    found = Watched()
    yield found
    assert methods == (lr_scheduler.LRScheduler.step, torch.optim.Optimizer.__init__)
    found.guard.stop()


def test_what_prepare_advances_is_not_advanced_again(watched: Watched) -> None:
    scheduler = lr_scheduler.CosineAnnealingLR(watched.optimizer, 9)
    watched.begin(scheduler)
    for _ in range(3):
        watched.update()
        watched.guard.step_ended()
    assert scheduler.last_epoch == 3
    watched.update()
    scheduler.step()  # as at an epoch's end
    words = r"CosineAnnealingLR\.step\(\) is called.*commit\(\) advances.*leave the call out"
    for found in (watched.guard.step_ended, watched.update):
        with pytest.raises(ConfigError, match=words):
            found()


def test_one_that_prepare_was_not_given_is_the_scripts_affair(watched: Watched) -> None:
    """A restart shows whether it is kept."""
    watched.begin()
    plateau = lr_scheduler.ReduceLROnPlateau(watched.optimizer)
    cosine = lr_scheduler.CosineAnnealingLR(watched.optimizer, 9)
    for _ in range(3):
        plateau.step(1.0)
        cosine.step()
        watched.update()
        watched.guard.step_ended()


def test_the_loop_may_not_step_by_itself(watched: Watched) -> None:
    watched.begin()
    with pytest.raises(ConfigError, match=r"SGD\.step\(\) is called in the loop, on gradients"):
        watched.optimizer.step()
    with watched.guard.asleep():
        watched.optimizer.step()
    watched.guard.stop()
    watched.optimizer.step()


def test_an_optimizer_of_the_model_must_be_prepared(watched: Watched) -> None:
    watched.begin()
    other = torch.optim.AdamW(MODEL.parameters())
    with pytest.raises(ConfigError, match=r"AdamW is used in the loop, but prepare\(\) does not"):
        other.step()
    mine: Any = other
    watched.state.register("mine", mine, per_rank=True)
    other.step()


def test_one_of_something_else_may_work_within_a_step(watched: Watched) -> None:
    """As one that looks for the change of an input which deceives the model."""
    watched.begin()
    before = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    for _ in range(2):
        change = torch.zeros(2, requires_grad=True)
        attack = torch.optim.Adam([change], lr=0.1)
        for _ in range(2):
            change.grad = torch.ones(2)
            attack.step()
        assert change.abs().min() > 0
        watched.guard.step_ended()
    before.step()
    watched.guard.step_ended()
    with pytest.raises(ConfigError, match=r"Adam is used in the loop, but prepare\(\) does not"):
        before.step()
