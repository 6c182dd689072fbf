"""Offer one step to the loop's body: batches, backwards, updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ddpjob_trainer.comm.world import Sent
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.gradients.ddp import Part
from ddpjob_trainer.telemetry.run_log import number_of

#: For who skips a batch: the other ranks wait for its gradients.
LEFT_OUT = (
    "; a batch that is to be left out needs its call as well: step.backward(0 * loss, weight=0),"
    " and the others have weight=1 then"
)


class _Work(Protocol):
    """Updates, which imports this module."""

    exchange: Any  # StepExchange

    def backward(
        self, step: Step, loss: torch.Tensor, *, weight: float | None, retain_graph: bool
    ) -> None: ...
    def update(self, step: Step, optimizers: Sequence[torch.optim.Optimizer]) -> None: ...
    def commit(self, step: Step) -> None: ...


@dataclass(slots=True)
class Step:
    """Hold one step of the loop: run.steps() yields it, step.commit() ends it.

    ``index`` counts steps from 0 over the whole run.
    ``batches`` yields this process's batches of the step, as ``collate`` makes them: by default
    tensors of shape (batch, ...), batch = global_batch / (processes x micro_batches).
    ``epoch`` counts from 0 too. Of a stream it is this process's own.
    """

    work: _Work
    index: int
    parts: Sequence[Part]
    batches: Iterator[Any]
    epoch: int = 0
    epoch_steps: int | None = None  # in each epoch; None: nobody knows
    losses: list[torch.Tensor] = field(default_factory=list)  # of each batch, added up
    weights: list[float] = field(default_factory=list)  # of each batch, or none at all
    committed: bool = False
    received: int = 0  # batches that the body has got
    mean: float | None = None  # its loss over all ranks, once it is known
    sent: Sent | None = None  # what the ranks tell one another of it
    refused: int = 0  # updates of it that this rank has refused
    consumed: int = 0  # batches with a backward since the last update
    updates: int = 0
    _ahead: bool = False  # a backward came when a later batch had been got already
    _again: bool = False  # a batch has had a second backward

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of a batch's mean loss to those that are there.

        Each batch needs one at least before an update; several losses of a batch are summed.
        ``loss``: a tensor of one element, computed through a prepared model.
        ``weight``: how much this batch counts in the step's mean, as the number of tokens in it,
        0 or more; default: by its samples. Every batch of a step, on every rank, has one, or none.
        ``retain_graph``: another backward goes through the same graph.

        Raises ConfigError.
        """
        number = None if weight is None else float(number_of("step.backward(): weight", weight))
        self.work.backward(self, loss, weight=number, retain_graph=retain_graph)

    def update(self, *optimizers: torch.optim.Optimizer) -> None:
        """Update with some optimizers in the midst of a step, as a GAN does. Then commit() ends it.

        Averages over the global batch, clips, updates, steps scheduler and EMA; then drops all
        gradients, also those that a loss left in other models. Without ``optimizers``: with all of
        them. Raises ConfigError, NotCommittedError.
        """
        self.work.update(self, optimizers)

    def commit(self) -> None:
        """End the step. Without an update() in it, update with all optimizers.

        An optimizer that no gradient has reached does not advance, if there are several. Snapshot,
        metrics and SIGTERM follow when the loop's body ends, so changes after commit() are in the
        snapshot too. Raises NotCommittedError if a batch had no backward, ConfigError.
        """
        self.work.commit(self)

    def stop(self) -> None:
        """End the run after this step, on all ranks; one rank's word is enough.

        After commit() the next step is the last; there all ranks may ``break`` instead. The last
        snapshot says that the run is finished.
        """
        self.work.exchange.stop_called = True

    @property
    def loss(self) -> float:
        """Mean loss of the step over all ranks, weighted as its gradients are; after commit().

        It waits for the other ranks' numbers. Raises NotCommittedError.
        """
        found: float = self.work.exchange.mean_loss(self)
        return found

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch. Raises ConfigError for a stream."""
        if self.epoch_steps is None:
            raise ConfigError(
                "step.ends_epoch: a stream does not say where it ends; when step.epoch is another"
                " than in the step before, an epoch has ended"
            )
        return (self.index + 1) % self.epoch_steps == 0

    # --- For the loop ----------------------------------------------------------------------

    def part(self) -> int:
        """Return the number of the batch that a forward or backward belongs to.

        The first that has been got and has had no backward since the last update, else the newest.
        """
        newest = max(self.received, 1) - 1
        return min(self.consumed, newest)

    def check_forward(self) -> None:
        """Refuse to go on from a batch without forward: its random numbers are over.

        Raises ConfigError, unless the batch has had its backward and the step was committed since.
        """
        if self.consumed < self.received:
            raise ConfigError(
                "level='elastic': the loop went on in step.batches before the forward of the batch"
                " that it had got. Each has its own random numbers, so what is collected, as by"
                " list(step.batches), would draw others at another world size: call the model on"
                " each batch before the next one is taken"
            )

    def add(self, number: int, loss: torch.Tensor, weight: float | None) -> None:
        """Account for a backward. Raises ConfigError when it is not clear which batch it is of."""
        self._check_weight(number, weight)
        # Two ways to use batches: one after another, with any number of losses each, or collected,
        # with one loss each. Mixed, a second loss looks like the next batch's first.
        self._ahead |= number < self.received - 1
        self._again |= number < self.consumed
        if self._ahead and self._again:
            raise ConfigError(
                "batches that were collected before the first step.backward() may have one loss"
                " each: add several losses of a batch up, or go through step.batches once and call"
                " step.backward() before the next batch"
            )
        self.consumed = max(self.consumed, number + 1)
        if number < len(self.losses):
            self.losses[number] = self.losses[number] + loss
        else:
            self.losses.append(loss)
            if weight is not None:
                self.weights.append(weight)

    def _check_weight(self, number: int, weight: float | None) -> None:
        if weight is not None and not 0 <= weight < math.inf:
            raise ConfigError(f"step.backward(weight={weight}) must be 0 or more, and finite")
        if self.losses and bool(self.weights) != (weight is not None):
            raise ConfigError(
                "step.backward(weight=...): give it for every batch of a step, or for none"
            )
        if number < len(self.weights) and weight != self.weights[number]:
            raise ConfigError(
                f"step.backward(weight={weight}): an earlier loss of the same batch had"
                f" {self.weights[number]}; all losses of a batch have one weight"
            )

    def updated(self) -> None:
        """Account for an update(): each batch needs another backward now."""
        self.updates += 1
        self.consumed = 0
        self._ahead = self._again = False

    def check_commit(self) -> None:
        """Raise NotCommittedError or ConfigError when the step cannot end now."""
        if self.committed:
            raise NotCommittedError(f"step {self.index}: commit() was called twice")
        if not self.updates:
            self.check_update("commit()")
        elif self.consumed:
            raise ConfigError(
                f"step {self.index}: after its last step.update() came a step.backward() whose"
                " gradients nothing would apply: call step.update(optimizer) after it, or leave"
                " all update()s of the step out"
            )

    def check_committed(self) -> None:
        """Raise NotCommittedError when the loop's body is over and the step is not."""
        if not self.committed:
            raise NotCommittedError(
                f"step {self.index} was left without step.commit(): call it at the end of the"
                f" loop's body{LEFT_OUT}"
            )

    def check_weightless(self) -> None:
        """Raise ConfigError where update() is asked for and the batches have weights."""
        if self.weights:
            raise ConfigError(
                "step.update() does not go with step.backward(weight=...): the weights of all"
                " ranks are added up once per step. Update with step.commit() only, or multiply"
                " the losses yourself"
            )

    def check_update(self, call: str) -> None:
        """Raise NotCommittedError unless every batch has had a backward."""
        done, wanted = self.consumed, len(self.parts)
        if self.committed:
            when = "after step.commit()"
        elif not done and not self.updates:
            when = "before step.backward(loss), which takes the place of loss.backward()"
            when += LEFT_OUT
        elif not done:
            when = (
                "before step.backward(loss). The update() before has dropped all gradients: give"
                " optimizers whose gradients are to be applied together to one"
                " update(first, second), or call step.backward() again after it; to go through the"
                " batches again, collect them first, with batches = list(step.batches)"
            )
        elif done < wanted:
            when = f"after {done} of {wanted} batches: go through all of step.batches and call"
            when += f" step.backward(loss) for each{LEFT_OUT}"
        else:
            return
        raise NotCommittedError(f"step {self.index}: {call} was called {when}")


def check_loss(loss: object) -> None:
    """Raise ConfigError for a loss without a backward."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"step.backward() needs a tensor, the loss, not a {type(loss).__name__}")
    if loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
        raise ConfigError(
            f"step.backward() needs a scalar loss with a gradient, not {list(loss.shape)} of"
            f" {loss.dtype} requires_grad={loss.requires_grad}"
        )
