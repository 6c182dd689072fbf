"""Follow Lightning: `Trainer(..., callbacks=[DDPJobCallback()])`."""

from __future__ import annotations

import math
import sys
from typing import Any

from ddpjob_trainer.adapters.record import RECORD, marks

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback  # Lightning's older name
else:
    from lightning.pytorch import Callback


class DDPJobCallback(Callback):  # type: ignore[misc]
    """Reports step, loss, checkpoints and signs of life of this rank to the launcher."""

    on_before_backward = marks("backward")  # in which ranks wait for one another
    on_after_backward = marks("update")
    on_validation_batch_start = marks("evaluation")

    def __init__(self) -> None:
        self._saving = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the record, perhaps from a checkpoint."""
        total = trainer.estimated_stepping_batches
        RECORD.begin(
            step=trainer.global_step, total_steps=int(total) if math.isfinite(total) else 0
        )

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Mark the forward pass."""
        self._settle(trainer)
        RECORD.at("forward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Record a batch, and with it perhaps an optimizer step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        RECORD.stepped(trainer.global_step, loss)
        self._settle(trainer)

    def on_save_checkpoint(self, *_: Any) -> None:
        """Record that a checkpoint is being written."""
        self._saving = RECORD.begun
        RECORD.saving()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the end of training."""
        self._settle(trainer)
        RECORD.ended()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record the exception that ends training."""
        RECORD.failed(exception)

    def _settle(self, trainer: Any) -> None:
        """Record a checkpoint as written: Lightning reports only that training continues."""
        if self._saving:
            self._saving = False
            RECORD.saved(trainer.global_step)
