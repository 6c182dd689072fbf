"""What trains wrongly without any restart is refused, with the cure; all else is let be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.guard import Guard, leaves

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


def loss(other: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = MODEL(other(torch.ones(2))).sum()
    return found


def test_a_module_that_the_loss_leads_to_must_be_prepared(watched: Watched) -> None:
    watched.begin()
    watched.guard.before_backward(loss(torch.nn.Identity()))
    watched.guard.before_backward(loss(torch.nn.Linear(2, 2).requires_grad_(False)))
    with pytest.raises(ConfigError, match=r"shape \[2, 2\] gets gradients .* does not know"):
        watched.guard.before_backward(loss(torch.nn.Linear(2, 2)))
    other = torch.nn.Linear(2, 2)
    watched.state.register("other", other)
    with pytest.raises(ConfigError, match=r"run\.register\(\) alone keeps it"):
        watched.guard.before_backward(loss(other))


def test_what_each_rank_has_for_itself_and_an_input_are_let_be(watched: Watched) -> None:
    watched.begin()
    other = torch.nn.Linear(2, 2)
    watched.state.register("mine", other, per_rank=True)
    watched.guard.before_backward(loss(other))
    change = torch.zeros(2, requires_grad=True)
    watched.guard.before_backward(MODEL(change).sum())
    watched.guard.before_backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("begins", [0, 5, 50])
def test_one_that_joins_late_is_found(watched: Watched, begins: int) -> None:
    watched.begin()
    for _ in range(begins):
        watched.guard.before_backward(loss(torch.nn.Identity()))
        watched.guard.step_ended()
    steps = 0
    with pytest.raises(ConfigError, match="gets gradients"):  # noqa: PT012
        while steps <= begins + 1:
            watched.guard.before_backward(loss(torch.nn.Linear(2, 2)))
            watched.guard.step_ended()
            steps += 1
    assert steps <= begins + 1


def test_the_leaves_of_a_loss_are_found_once_each() -> None:
    x = torch.ones(2, requires_grad=True)
    hidden = checkpoint(MODEL, x, use_reentrant=False)
    assert isinstance(hidden, torch.Tensor)
    found = list(leaves(MODEL(hidden).sum() + hidden.sum()))
    assert {id(leaf) for leaf in found} == {id(x), *map(id, MODEL.parameters())}
    assert len(found) == 3
    assert list(leaves(torch.ones(()))) == []


def test_what_prepare_advances_is_not_advanced_again(watched: Watched) -> None:
    scheduler = lr_scheduler.CosineAnnealingLR(watched.optimizer, 9)
    watched.begin(scheduler)
    for _ in range(3):
        watched.update()
        watched.guard.step_ended()
    assert scheduler.last_epoch == 3
    watched.update()
    scheduler.step()  # as at an epoch's end
    with pytest.raises(ConfigError, match=r"commit\(\) advances.*leave the call out"):
        watched.guard.step_ended()


def test_it_is_found_before_commit_as_well(watched: Watched) -> None:
    scheduler = lr_scheduler.ExponentialLR(watched.optimizer, 0.5)
    watched.begin(scheduler)
    scheduler.step()
    with pytest.raises(ConfigError, match=r"ExponentialLR\.step\(\) is called in the loop"):
        watched.update()


def plateau(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    return lambda: scheduler.step(1.0)


def cosine(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lr_scheduler.CosineAnnealingLR(optimizer, 9).step


@pytest.mark.parametrize("make", [plateau, cosine])
def test_one_that_prepare_was_not_given_is_the_scripts_affair(watched: Watched, make: Any) -> None:
    """A restart shows whether it is kept."""
    watched.begin()
    advance = make(watched.optimizer)
    for _ in range(3):
        advance()
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
