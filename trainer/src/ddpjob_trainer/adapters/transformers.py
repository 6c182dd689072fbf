"""Follow transformers' Trainer: `Trainer(..., callbacks=[DDPJobCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ddpjob_trainer.adapters import record


class DDPJobCallback(TrainerCallback):  # type: ignore[misc]
    """Reports step, loss, checkpoints and signs of life of this rank to the launcher."""

    def __init__(self) -> None:
        self._record: record.Record | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the record, perhaps from a checkpoint."""
        self._record = record.begin(step=state.global_step, total_steps=state.max_steps)
        model = more.get("model")
        if model is not None and not args.torch_compile:  # a hook would break its graph
            model.register_forward_pre_hook(record.forward_begins)
            model.register_forward_hook(record.forward_ends)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark the forward pass."""
        if self._record is not None:
            self._record.at("forward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark the update."""
        if self._record is not None:
            self._record.at("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record an optimizer step; a checkpoint may follow."""
        if self._record is None:
            return
        self._record.stepped(state.global_step)
        if control.should_save:
            self._record.saving()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark an evaluated batch."""
        if self._record is not None:
            self._record.at("evaluation")

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the mean loss since the last log."""
        loss = (more.get("logs") or {}).get("loss")
        if self._record is not None and loss is not None:
            self._record.told(loss)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record a checkpoint as written."""
        if self._record is not None:
            self._record.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the end of training."""
        if self._record is not None:
            self._record.ended()
