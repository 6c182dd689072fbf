"""What trains wrongly without any restart is refused, with the cure; all else is let be."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.models.guard import Guard, Touched

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # no update precedes


class Trained:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = TrainingState(self.model)
        self.updater = Updater()
        self.updater.trains(dict(self.model.named_parameters()))
        self.updater.units.append(Unit(self.optimizer, None, Clip(None, [])))


class Watched(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard(self.state, self.updater)

    def begin(self, scheduler: Any = None) -> None:
        self.updater.units[0].scheduler = scheduler
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


def test_what_prepare_advances_is_not_advanced_again(watched):
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


def test_one_that_prepare_was_not_given_is_the_scripts_affair(watched):
    """A restart shows whether it is kept."""
    watched.begin()
    plateau = lr_scheduler.ReduceLROnPlateau(watched.optimizer)
    cosine = lr_scheduler.CosineAnnealingLR(watched.optimizer, 9)
    for _ in range(3):
        plateau.step(1.0)
        cosine.step()
        watched.update()
        watched.guard.step_ended()


def test_the_loop_may_not_step_by_itself(watched):
    watched.begin()
    with pytest.raises(ConfigError, match=r"SGD\.step\(\) is called in the loop, on gradients"):
        watched.optimizer.step()
    with watched.guard.asleep():
        watched.optimizer.step()
    watched.guard.stop()
    watched.optimizer.step()


def test_an_optimizer_of_the_model_must_be_prepared(watched):
    watched.begin()
    other = torch.optim.AdamW(watched.model.parameters())
    with pytest.raises(ConfigError, match=r"AdamW is used in the loop, but prepare\(\) does not"):
        other.step()
    watched.state.register("mine", other, per_rank=True)  # type: ignore[arg-type]
    other.step()


def test_one_of_something_else_may_work_within_a_step(watched):
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


class Backwards(Trained):
    def __init__(self, *, local: bool = True, scaler: torch.amp.GradScaler | None = None) -> None:
        super().__init__()
        self.updater.scaler = scaler
        averaging: Any = SimpleNamespace(local=local)
        self.touched = Touched(averaging, self.updater)

    def backward(self, number: int, *, weighted: bool = False) -> None:
        self.touched.before_backward(number)
        self.updater.scale(self.model(torch.ones(1, 2)).sum()).backward()
        self.touched.after_backward(weighted=weighted)

    def update(self) -> None:
        self.touched.before_update(self.updater.units)


def clip(watched: Backwards) -> None:
    nn.utils.clip_grad_norm_(watched.model.parameters(), 0.1)


CHANGES: dict[str, Callable[[Backwards], object]] = {
    "clip": clip,
    "replace": lambda watched: setattr(watched.model.weight, "grad", torch.ones(2, 2)),
    "drop": lambda watched: watched.optimizer.zero_grad(),
    "zero": lambda watched: watched.optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_too_early_is_refused(change):
    watched = Backwards()
    watched.backward(0)
    CHANGES[change](watched)
    with pytest.raises(ConfigError, match=r"between two batches of a step.*leave optimizer\.zero"):
        watched.backward(1)
    if change != "drop":
        with pytest.raises(ConfigError, match=r"after step\.backward.*clip_grad_norm=.*before_up"):
            watched.update()


def test_gradients_that_another_backward_has_left_are_refused():
    watched = Backwards()
    watched.backward(0)
    watched.backward(1)
    watched.update()
    watched.updater.forget()
    watched.touched.before_backward(0, first=True)
    watched.model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"before the first step\.backward\(\) since the last up"):
        watched.touched.before_backward(0, first=True)


def test_between_two_losses_of_a_batch_a_models_gradients_may_be_dropped():
    """As a GAN drops what the generator's loss has left in the discriminator."""
    watched = Backwards()
    for _ in range(3):
        watched.backward(0)
        watched.optimizer.zero_grad()
        watched.backward(0)
        watched.update()
        watched.optimizer.zero_grad()


def test_a_mean_may_be_clipped_unless_it_lacks_the_factor_of_the_weights():
    watched = Backwards(local=False)
    for weighted in (False, True):
        watched.backward(0, weighted=weighted)
        clip(watched)
        if not weighted:
            watched.update()
    with pytest.raises(ConfigError, match="were not yet the mean"):
        watched.update()


def test_scaled_gradients_may_be_clipped_once_the_script_has_unscaled_them():
    watched = Backwards(local=False, scaler=torch.amp.GradScaler("cpu"))
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
