"""For transformers' Trainer: `Trainer(..., callbacks=[DDPJobCallback()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ddpjob_trainer.adapters import record


class DDPJobCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the launcher step, loss and checkpoints, and that this rank is alive."""

    def __init__(self) -> None:
        self._record: record.Record | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Training begins, or goes on from a checkpoint."""
        self._record = record.begin(step=state.global_step, total_steps=state.max_steps)
        model = more.get("model")
        if model is not None and not args.torch_compile:  # a hook would cut its graph
            model.register_forward_pre_hook(record.forward_begins)
            model.register_forward_hook(record.forward_ends)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The batches of a step are there."""
        if self._record is not None:
            self._record.at("forward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The gradients are there."""
        if self._record is not None:
            self._record.at("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """An optimizer step is done; a checkpoint may follow."""
        if self._record is None:
            return
        self._record.stepped(state.global_step)
        if control.should_save:
            self._record.saving()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A batch was evaluated."""
        if self._record is not None:
            self._record.at("evaluation")

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The Trainer tells the mean loss since it told it last."""
        loss = (more.get("logs") or {}).get("loss")
        if self._record is not None and loss is not None:
            self._record.told(loss)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A checkpoint is written."""
        if self._record is not None:
            self._record.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Training is over."""
        if self._record is not None:
            self._record.ended()
