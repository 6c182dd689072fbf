"""Refuse what a loop would train wrongly without any restart.

Guard compares optimizers and schedulers by identity: who steps, who counts; Touched compares
gradients. What only a restart would lose is found by the check of each restart (replay/).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.elastic import Averaging
from ddpjob_trainer.optim.update import Unit, Updater, held_by
from ddpjob_trainer.snapshot.training_state import TrainingState

_UPDATES = 4  # in which gradients are looked at

_Mark = tuple[torch.Tensor, int]  # a gradient and its version


class Guard:
    """Watches one loop until stop(). Raises ConfigError from the use of something unknown."""

    def __init__(self, state: TrainingState, updater: Updater) -> None:
        self._state = state
        self._updater = updater
        self._asleep = False
        self._steps = 0
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )  # with the step in which each was seen first
        self._counts: list[Any] = []  # of the schedulers, as our own updates have left them
        self._hook: Any = register_optimizer_step_pre_hook(self._optimizer_steps)

    def stop(self) -> None:
        """Watch no longer."""
        self._hook.remove()

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """Let an evaluation use other optimizers than the loop's."""
        before, self._asleep = self._asleep, True
        try:
            yield
        finally:
            self._asleep = before

    # --- In a step, in the order of the calls -------------------------------------------------

    def scheduled(self) -> None:
        """Remember where a resume, or our own update, has left the schedulers."""
        self._counts = self._now()

    def check_schedulers(self) -> None:
        """Refuse a scheduler that the script has advanced as well."""
        for unit, before, now in zip(self._updater.units, self._counts, self._now(), strict=True):
            if now != before:
                raise ConfigError(
                    f"{type(unit.scheduler).__name__}.step() is called in the loop, but commit()"
                    " advances the scheduler that prepare() was given: leave the call out, or keep"
                    " the scheduler with run.register('scheduler', scheduler) in place of"
                    " prepare(scheduler=...)"
                )

    def step_ended(self) -> None:
        """Count a step."""
        self.check_schedulers()
        self._steps += 1

    def _now(self) -> list[Any]:
        return [getattr(unit.scheduler, "last_epoch", None) for unit in self._updater.units]

    # --- torch's hook -------------------------------------------------------------------------

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # What is registered for each rank is each rank's own affair.
        own = any(optimizer is value for value in self._state.per_rank.values())
        if self._asleep or own or self._updater.applying:
            return
        name = type(optimizer).__name__
        if any(optimizer is unit.optimizer for unit in self._updater.units):
            raise ConfigError(
                f"{name}.step() is called in the loop, on gradients that are not averaged over the"
                " ranks: call step.backward(loss) and step.update(optimizer), or step.commit()"
                " alone, which update with it"
            )
        trains = not held_by([optimizer]).keys().isdisjoint(self._updater.parameters)
        # One of something else may work within a step, as on an input that deceives the model.
        if trains or self._others.setdefault(optimizer, self._steps) != self._steps:
            raise ConfigError(
                f"{name} is used in the loop, but prepare() does not know it: the gradients that it"
                " applies are not averaged over the ranks, and no snapshot would hold its state."
                " Train with several as in run.prepare(model, [first, second]) or"
                " run.prepare([model, other], [optimizer, other_optimizer]). Of SAM and the like"
                " give prepare() the base optimizer, as in Recipes of docs/guides/data.md"
            )


class Touched:
    """Finds gradients changed or dropped before they are the mean over the global batch.

    clip_grad_norm_() before commit() is right where DDP has averaged in backward. Where gradients
    are still this rank's own, lack a factor or are scaled, it would clip something else. A loop
    does the same in every step, so the first updates of each process tell. Raises ConfigError.
    """

    def __init__(self, averaging: Averaging, updater: Updater) -> None:
        self._averaging = averaging
        self._updater = updater
        self._left = _UPDATES
        self._newest = 0  # number of the batch of the last backward
        self._marks: dict[torch.nn.Parameter, _Mark] = {}

    def before_backward(self, number: int, *, first: bool = False) -> None:
        """Check what is left of the batches before. ``first``: of any since the last update."""
        if first and self._left and any(p.grad is not None for p in self._updater.parameters):
            raise ConfigError(
                "there are gradients before the first step.backward() since the last update: what"
                " loss.backward() leaves is not averaged over the ranks. Call step.backward(loss)"
                " in its place or add the losses up; what is to be dropped: optimizer.zero_grad()"
            )
        if number > self._newest:
            for parameter, (gradient, version) in self._marks.items():
                if parameter.grad is not gradient or gradient._version != version:
                    raise _refusal("between two batches of a step")
        self._newest = number

    def after_backward(self, *, weighted: bool) -> None:
        """Remember the gradients, if they are not yet what will be applied."""
        self._marks = {}
        updater = self._updater
        if self._left and (weighted or self._averaging.local or updater.scaler is not None):
            self._marks = {
                p: (p.grad, p.grad._version) for p in updater.parameters if p.grad is not None
            }

    def before_update(self, units: Sequence[Unit]) -> None:
        """Check that the gradients of these are as backward has left them."""
        marks, self._marks, self._newest = self._marks, {}, 0
        self._left = max(0, self._left - 1)
        for unit in units if marks else ():
            if self._updater.is_unscaled(unit):  # by the script, which may clip then
                continue
            for parameter in unit.parameters:
                gradient, version = marks.get(parameter, (None, 0))
                now = parameter.grad
                if gradient is None or now is None:
                    continue
                if now is not gradient or now._version != version:
                    raise _refusal("after step.backward()")


def _refusal(when: str) -> ConfigError:
    return ConfigError(
        f"gradients were changed or dropped {when}, when they were not yet the mean over the whole"
        " step and all ranks: leave optimizer.zero_grad() out, since commit() and update() do it;"
        " clip with run.prepare(..., clip_grad_norm=...); change them in"
        " run.prepare(..., before_update=...)"
    )
