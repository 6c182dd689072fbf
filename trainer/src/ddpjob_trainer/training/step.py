"""One step, as the loop's body sees it: batches, backwards, updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.gradients.ddp import Part


class _Loop(Protocol):
    def backward(self, step: Step, loss: torch.Tensor, *, retain_graph: bool) -> None: ...

    def update(self, step: Step, optimizers: Sequence[torch.optim.Optimizer]) -> None: ...

    def commit(self, step: Step) -> None: ...


@dataclass(slots=True)
class Step:
    """``index`` counts from 0; ``batches`` yields this process's batches of the step.

    ``epoch`` counts from 0 too. Of a stream it is this process's own.
    """

    loop: _Loop
    index: int
    parts: Sequence[Part]
    batches: Iterator[Any]
    epoch: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)  # of each batch, added up
    committed: bool = False
    handed: int = 0  # batches that the body has got
    covered: int = 0  # batches with a backward since the last update
    updates: int = 0
    _ahead: bool = False  # a backward came when a later batch had been got already
    _again: bool = False  # a batch has had a second backward

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of a batch's mean loss to those that are there.

        Each batch needs one backward at least before an update; several losses of a batch count
        as their sum. ``retain_graph``: another backward goes through the same graph.
        """
        self.loop.backward(self, loss, retain_graph=retain_graph)

    def update(self, *optimizers: torch.optim.Optimizer) -> None:
        """Update with some optimizers in the midst of a step, as a GAN does; then commit() ends it.

        Their gradients are averaged over the global batch and applied: clip, optimizer, scheduler,
        EMA. Then all gradients are dropped, also those that a loss left in other models. Without
        ``optimizers``: with all of them.
        """
        self.loop.update(self, optimizers)

    def commit(self) -> None:
        """End the step. Without an update() in it, update with all optimizers.

        An optimizer that no gradient has reached does not advance, if there are several. Snapshot,
        metrics and SIGTERM follow when the loop's body ends, so state that the body changes after
        commit() is in the snapshot as well.
        """
        self.loop.commit(self)

    # --- For the loop ----------------------------------------------------------------------

    def part(self) -> int:
        """Number of the batch that a forward or backward belongs to.

        The first that has been got and has had no backward since the last update, else the newest.
        """
        newest = max(self.handed, 1) - 1
        return min(self.covered, newest)

    def add(self, number: int, loss: torch.Tensor) -> None:
        """Account for a backward. Raises ConfigError when it is not clear which batch it is of."""
        self._ahead |= number < self.handed - 1
        self._again |= number < self.covered
        if self._ahead and self._again:
            raise ConfigError(
                "batches that were collected before the first step.backward() may have one loss"
                " each: add several losses of a batch up, or go through step.batches once and call"
                " step.backward() before the next batch"
            )
        self.covered = max(self.covered, number + 1)
        if number < len(self.losses):
            self.losses[number] = self.losses[number] + loss
        else:
            self.losses.append(loss)

    def updated(self) -> None:
        """Account for an update(): each batch needs another backward now."""
        self.updates += 1
        self.covered = 0
        self._ahead = self._again = False

    def check_commit(self) -> None:
        """Raise NotCommittedError or ConfigError when the step cannot end now."""
        if self.committed:
            raise NotCommittedError(f"step {self.index}: commit() was called twice")
        if not self.updates:
            self.check_update("commit()")
        elif self.covered:
            raise ConfigError(
                f"step {self.index}: after its last step.update() came a step.backward() whose"
                " gradients nothing would apply: call step.update(optimizer) after it, or leave"
                " all update()s of the step out"
            )

    def check_update(self, call: str) -> None:
        """Raise NotCommittedError unless every batch has had a backward."""
        done, wanted = self.covered, len(self.parts)
        if self.committed or not done:
            when = "after step.commit()" if self.committed else "before step.backward(loss)"
            raise NotCommittedError(f"step {self.index}: {call} was called {when}")
        if done < wanted:
            raise NotCommittedError(
                f"step {self.index}: {call} was called after {done} of {wanted} batches: go through"
                " all of step.batches and call step.backward(loss) for each"
            )
