"""For Lightning: `Trainer(..., callbacks=[DDPJobCallback()])`."""

from __future__ import annotations

import math
import sys
from typing import Any

from ddpjob_trainer.adapters.record import Record, begin

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback  # the same under its older name
else:
    from lightning.pytorch import Callback


class DDPJobCallback(Callback):  # type: ignore[misc]
    """Tells the launcher step, loss and checkpoints, and that this rank is alive."""

    def __init__(self) -> None:
        self._record: Record | None = None
        self._saving = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins, or goes on from a checkpoint."""
        total = trainer.estimated_stepping_batches
        self._record = begin(
            step=trainer.global_step, total_steps=int(total) if math.isfinite(total) else 0
        )

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """A batch is there."""
        self._settle(trainer)
        self._at("forward")

    def on_before_backward(self, *_: Any) -> None:
        """The loss is there; ranks wait for one another from here on."""
        self._at("backward")

    def on_after_backward(self, *_: Any) -> None:
        """The gradients are there."""
        self._at("update")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """A batch is done, and with it perhaps an optimizer step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._record is not None:
            self._record.stepped(trainer.global_step, loss)
        self._settle(trainer)

    def on_validation_batch_start(self, *_: Any) -> None:
        """A batch is evaluated."""
        self._at("evaluation")

    def on_save_checkpoint(self, *_: Any) -> None:
        """A checkpoint will be written."""
        if self._record is not None:
            self._saving = True
            self._record.saving()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self._settle(trainer)
        if self._record is not None:
            self._record.ended()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training ends with an exception."""
        if self._record is not None:
            self._record.failed(exception)

    def _settle(self, trainer: Any) -> None:
        """Lightning does not say when a checkpoint is written, only that it goes on."""
        if self._saving and self._record is not None:
            self._saving = False
            self._record.saved(trainer.global_step)

    def _at(self, activity: Any) -> None:
        if self._record is not None:
            self._record.at(activity)
