"""Follow accelerate: `follow(accelerator)`, right after the Accelerator is made.

No tracker: accelerate starts trackers in the main process only, and each rank has to give its signs
of life.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ddpjob_trainer.adapters import record


def follow(accelerator: Any, *, step: int = 0, total_steps: int = 0) -> None:
    """Report step, loss, checkpoints and signs of life of this rank to the launcher.

    ``step``: optimizer steps done before, after a resume; ``accelerator.log(..., step=)`` corrects
    it. ``total_steps``: 0: unknown. The loss is that of ``accelerator.log``, or of ``backward``.
    Watched from the first ``backward`` on, to ``end_training``.
    """
    following = _Following(accelerator, step, total_steps)
    for name in ("prepare_model", "backward", "log", "save_state", "end_training"):
        theirs = getattr(accelerator, name)
        setattr(accelerator, name, wraps(theirs)(getattr(following, name)(theirs)))


class _Following:
    """Wrappers for the methods of one Accelerator."""

    def __init__(self, accelerator: Any, step: int, total_steps: int) -> None:
        self._accelerator = accelerator
        self._step = step
        self._total = total_steps
        self._record: record.Record | None = None
        self._logs = False  # the script logs losses itself

    def prepare_model(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Give a sign of life at every forward, in evaluations too."""

        def prepare_model(*args: Any, **more: Any) -> Any:
            model = theirs(*args, **more)
            model.register_forward_pre_hook(record.forward_begins)
            return model

        return prepare_model

    def backward(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Count a step at the backward pass of its last micro-batch."""

        def backward(loss: Any, **more: Any) -> None:
            mine = self._record = self._record or record.begin(
                step=self._step, total_steps=self._total
            )
            mine.at("backward")
            theirs(loss, **more)
            if self._accelerator.sync_gradients:
                self._step += 1
                mine.stepped(self._step, None if self._logs else loss.detach())
            else:
                mine.at("data")

        return backward

    def log(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Take step and loss from the script."""

        def log(values: dict[str, Any], step: int | None = None, *args: Any, **more: Any) -> None:
            theirs(values, step, *args, **more)
            loss = values.get("loss", values.get("train_loss"))
            self._logs = self._logs or loss is not None
            self._step = self._step if step is None else step
            if self._record is not None:
                self._record.stepped(self._step)
                if loss is not None:
                    self._record.told(loss)

        return log

    def save_state(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Record a checkpoint."""

        def save_state(*args: Any, **more: Any) -> Any:
            if self._record is None:
                return theirs(*args, **more)
            self._record.saving()
            path = theirs(*args, **more)
            self._record.saved(self._step)
            return path

        return save_state

    def end_training(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Record the end of training."""

        def end_training() -> None:
            theirs()
            if self._record is not None:
                self._record.ended()

        return end_training
