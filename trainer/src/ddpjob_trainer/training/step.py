"""One optimizer step, as the loop's body sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ddpjob_trainer.gradients.ddp import Part


class _Loop(Protocol):
    def backward(self, step: Step, loss: torch.Tensor) -> None: ...

    def commit(self, step: Step) -> None: ...


@dataclass(slots=True)
class Step:
    """``index`` counts from 0; ``batches`` yields this process's batches of the step."""

    loop: _Loop
    index: int
    parts: Sequence[Part]
    batches: Iterator[Any]
    losses: list[torch.Tensor] = field(default_factory=list)
    committed: bool = False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a batch's mean loss; call it once for each batch.

        After the last one the gradients are averaged over all samples of the global batch.
        """
        self.loop.backward(self, loss)

    def commit(self) -> None:
        """Apply the gradients: clip, optimizer, scheduler, EMA.

        Snapshot, metrics and SIGTERM follow when the loop's body ends, so state that the body
        changes after commit() is in the snapshot as well.
        """
        self.loop.commit(self)
