"""Follow transformers' Trainer: `Trainer(..., callbacks=[DDPJobCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ddpjob_trainer.adapters.record import RECORD, forward_begins, forward_ends, marks


class DDPJobCallback(TrainerCallback):  # type: ignore[misc]
    """Reports step, loss, checkpoints and signs of life of this rank to the launcher."""

    on_step_begin = marks("forward")
    on_pre_optimizer_step = marks("update")
    on_prediction_step = marks("evaluation")

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the record, perhaps from a checkpoint."""
        RECORD.begin(step=state.global_step, total_steps=state.max_steps)
        model = more.get("model")
        if model is not None and not args.torch_compile:  # a hook would break its graph
            model.register_forward_pre_hook(forward_begins)
            model.register_forward_hook(forward_ends)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record an optimizer step; a checkpoint may follow."""
        RECORD.stepped(state.global_step)
        if control.should_save:
            RECORD.saving()

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the mean loss since the last log."""
        loss = (more.get("logs") or {}).get("loss")
        if loss is not None:
            RECORD.add_loss(loss)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record a checkpoint as written."""
        RECORD.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the end of training."""
        RECORD.ended()
