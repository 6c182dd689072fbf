"""Finds a loop that changes or drops gradients before they are the mean over the global batch.

clip_grad_norm_() before commit(), as every plain loop has it, is right where DDP has averaged in
backward. Where gradients are still this rank's own, lack a factor or are scaled, it would clip
something else, by another amount on every number of ranks; and zero_grad() between two batches of
a step drops the first one's. Looked for before the first updates of each process: a loop does the
same in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.ddp import Averaging
from ddpjob_trainer.optim.update import Unit, Updater

_UPDATES = 4

_Mark = tuple[torch.Tensor, int]  # a gradient and its version


class Touched:
    """Watches the gradients of one loop. Raises ConfigError."""

    def __init__(self, averaging: Averaging, updater: Updater) -> None:
        self._averaging = averaging
        self._updater = updater
        self._left = _UPDATES
        self._newest = 0  # number of the batch of the last backward
        self._marks: dict[torch.nn.Parameter, _Mark] = {}

    def before_backward(self, number: int, *, first: bool = False) -> None:
        """Check that what the batches before have left is there, when another one begins.

        ``first``: since the last update; so there is nothing yet.
        """
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
        for unit in units:
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
