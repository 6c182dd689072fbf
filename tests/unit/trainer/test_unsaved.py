"""What counts on within the loop, and no snapshot would hold: refused, with the cure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.unsaved import Guard

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # no update precedes

MODEL = torch.nn.Linear(2, 2)


class Watched:
    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD(MODEL.parameters(), lr=1.0)
        self.state = TrainingState(MODEL)
        self.updater = Updater()
        self.guard: Guard | None = None

    def begin(self, scheduler: Any = None) -> None:
        self.updater.units.append(Unit(self.optimizer, scheduler, Clip(None, [])))
        if scheduler is not None:
            self.state.register("scheduler", scheduler)
        self.guard = Guard(self.state, self.updater, [], modules=False)


@pytest.fixture
def watched() -> Iterator[Watched]:
    methods = lr_scheduler.LRScheduler.step, lr_scheduler.SequentialLR.step
    found = Watched()
    yield found
    if found.guard is not None:
        found.guard.stop()
    assert methods == (lr_scheduler.LRScheduler.step, lr_scheduler.SequentialLR.step)


def plateau(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    return lambda: scheduler.step(1.0)


def cosine(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lr_scheduler.CosineAnnealingLR(optimizer, 9).step


def average(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    found = AveragedModel(MODEL)
    return lambda: found.update_parameters(MODEL)


@pytest.mark.parametrize("make", [plateau, cosine, average])
def test_what_advances_in_the_loop_must_be_kept(watched, make):  # type: ignore[no-untyped-def]
    watched.begin()
    advance = make(watched.optimizer)  # being made is no use
    with pytest.raises(ConfigError, match=r"no snapshot would hold.*run\.register\('"):
        advance()
    with watched.guard.asleep():
        advance()


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    linear, cosine = (
        lr_scheduler.LinearLR(optimizer, 0.5),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    )
    return lr_scheduler.SequentialLR(optimizer, [linear, cosine], [2])


def test_a_registered_scheduler_advances_those_that_it_is_made_of(watched):  # type: ignore[no-untyped-def]
    scheduler = sequential(watched.optimizer)
    watched.begin()
    watched.state.register("mine", scheduler)
    watched.optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(3):
        scheduler.step()
    assert scheduler.last_epoch == 3


def test_what_prepare_advances_is_not_advanced_again(watched):  # type: ignore[no-untyped-def]
    scheduler = sequential(watched.optimizer)
    watched.begin(scheduler)
    with pytest.raises(ConfigError, match=r"commit\(\) advances.*leave the call out"):
        scheduler.step()
    assert watched.updater.update(watched.updater.units)
    assert scheduler.last_epoch == 1


def test_a_scheduler_of_an_optimizer_that_is_not_prepared_is_its_owners_affair(watched):  # type: ignore[no-untyped-def]
    other = torch.optim.SGD(MODEL.parameters(), lr=1.0)
    watched.begin()
    cosine(other)()


def test_a_scaler_of_the_loops_own_is_refused(watched):  # type: ignore[no-untyped-def]
    """commit() would apply gradients that are too large by its scale, unseen with Adam."""
    watched.begin()
    scaler = torch.amp.GradScaler("cpu")
    loss = MODEL(torch.ones(2)).sum()
    with pytest.raises(ConfigError, match=r"step\.backward\(\) scales the loss itself"):
        scaler.scale(loss)
    torch.amp.GradScaler("cpu", enabled=False).scale(loss)
    watched.updater.scaler = scaler
    assert watched.updater.scale(loss) == loss * 65536
    with pytest.raises(ConfigError, match="the scaler to"):
        scaler.scale(loss)


@pytest.mark.parametrize("begins", [0, 5])
def test_a_teacher_that_learns_by_data_is_found_whenever_it_begins(begins):  # type: ignore[no-untyped-def]
    watched, teacher = Watched(), torch.nn.Linear(2, 2).requires_grad_(False)
    watched.updater.units.append(Unit(watched.optimizer, None, Clip(None, [])))
    watched.guard = Guard(watched.state, watched.updater, [], modules=True)
    guard = watched.guard

    def train(steps: int) -> None:
        for _ in range(steps):
            teacher(torch.ones(2))
            teacher.weight.data.mul_(0.9)  # its version stays
            guard.step_ended()

    try:
        for _ in range(begins):
            guard.step_ended()
        with pytest.raises(ConfigError, match="Linear changes its parameters in the loop"):
            train(5)
    finally:
        watched.guard.stop()


def test_a_teacher_that_learns_at_an_epochs_end_only_is_found(watched):  # type: ignore[no-untyped-def]
    watched.updater.units.append(Unit(watched.optimizer, None, Clip(None, [])))
    watched.guard = Guard(watched.state, watched.updater, [], modules=True)
    teacher = torch.nn.Linear(2, 2).requires_grad_(False)

    def train() -> None:
        for step in range(1, 17):
            teacher(torch.ones(2))
            if step % 4 == 0:  # never between two steps in which it is looked at
                teacher.load_state_dict(MODEL.state_dict())
            watched.guard.step_ended()

    with pytest.raises(ConfigError, match="Linear changes its parameters in the loop"):
        train()


def test_a_loop_over_epochs_around_that_over_the_steps_is_told_of_once(watched):  # type: ignore[no-untyped-def]
    watched.updater.units.append(Unit(watched.optimizer, None, Clip(None, [])))
    said: list[str] = []
    watched.guard = guard = Guard(
        watched.state, watched.updater, [], modules=False, say=said.append, variables=True
    )

    def make() -> Iterator[int]:
        for step in range(4):
            yield step
            guard.step_ended()

    steps = make()
    for _ in range(2):
        for _ in itertools.islice(steps, 2):
            pass
    (text,) = said
    assert "stands within another one" in text
    assert "step.epoch" in text


def test_a_network_that_only_measures_now_and_then_is_let_be(watched):  # type: ignore[no-untyped-def]
    watched.updater.units.append(Unit(watched.optimizer, None, Clip(None, [])))
    watched.guard = Guard(watched.state, watched.updater, [], modules=True)
    for step in range(20):
        if step > 2:
            with torch.no_grad():
                torch.nn.Linear(2, 2)(torch.ones(2))
        watched.guard.step_ended()


def test_an_optimizer_of_the_model_that_is_made_in_the_loop_is_refused(watched: Watched) -> None:
    """It would never step: commit() goes on with the one that prepare() was given."""
    init = torch.optim.Optimizer.__init__
    watched.begin()
    assert watched.guard is not None
    with pytest.raises(ConfigError, match=r"AdamW is made in the loop for parameters of the model"):
        torch.optim.AdamW(MODEL.parameters())
    with watched.guard.asleep():
        torch.optim.AdamW(MODEL.parameters())
    watched.guard.stop()
    assert torch.optim.Optimizer.__init__ is init
    torch.optim.AdamW(MODEL.parameters())


def test_an_optimizer_of_something_else_may_work_within_a_step(watched: Watched) -> None:
    """As one that looks for the change of an input which deceives the model."""
    before = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    watched.begin()
    change = torch.zeros(2, requires_grad=True)
    attack = torch.optim.Adam([change], lr=0.1)
    change.grad = torch.ones(2)
    attack.step()
    assert change.abs().min() > 0
    with pytest.raises(
        ConfigError, match=r"Adam is used in the loop, but prepare\(\) does not know"
    ):
        before.step()
