"""Follow accelerate: `follow(accelerator)`, right after the Accelerator is made.

No tracker: accelerate starts trackers in the main process only, and each rank has to give its signs
of life.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ddpjob_trainer.adapters.record import RECORD, forward_begins

Theirs = Callable[..., Any]


def follow(accelerator: Any, *, step: int = 0, total_steps: int = 0) -> None:
    """Report step, loss, checkpoints and signs of life of this rank to the launcher.

    ``step``: optimizer steps done before, after a resume; ``accelerator.log(..., step=)`` corrects
    it. ``total_steps``: 0: unknown. The loss is that of ``accelerator.log``, or of ``backward``.
    Watched from the first ``backward`` on, to ``end_training``.
    """
    following = _Following(accelerator, step, total_steps)
    for name in ("prepare_model", "backward", "log", "save_state", "end_training"):
        theirs = getattr(accelerator, name)
        setattr(accelerator, name, partial(getattr(following, name), theirs))


class _Following:
    """Methods for one Accelerator that call those it had, ``theirs``."""

    def __init__(self, accelerator: Any, step: int, total_steps: int) -> None:
        self._accelerator = accelerator
        self._step = step
        self._total = total_steps
        self._logs = False  # the script logs losses itself

    def prepare_model(self, theirs: Theirs, *args: Any, **more: Any) -> Any:
        """Give a sign of life at every forward, in evaluations too."""
        model = theirs(*args, **more)
        model.register_forward_pre_hook(forward_begins)
        return model

    def backward(self, theirs: Theirs, loss: Any, **more: Any) -> None:
        """Count a step at the backward pass of its last micro-batch."""
        if not RECORD.begun:
            RECORD.begin(step=self._step, total_steps=self._total)
        RECORD.at("backward")
        theirs(loss, **more)
        if self._accelerator.sync_gradients:
            self._step += 1
            RECORD.stepped(self._step, None if self._logs else loss.detach())
        else:
            RECORD.at("data")

    def log(
        self,
        theirs: Theirs,
        values: dict[str, Any],
        step: int | None = None,
        *args: Any,
        **more: Any,
    ) -> None:
        """Take step and loss from the script."""
        theirs(values, step, *args, **more)
        loss = values.get("loss", values.get("train_loss"))
        self._logs = self._logs or loss is not None
        self._step = self._step if step is None else step
        RECORD.stepped(self._step)
        if loss is not None:
            RECORD.add_loss(loss)

    def save_state(self, theirs: Theirs, *args: Any, **more: Any) -> Any:
        """Record a checkpoint."""
        RECORD.saving()
        path = theirs(*args, **more)
        RECORD.saved(self._step)
        return path

    def end_training(self, theirs: Theirs) -> None:
        """Record the end of training."""
        theirs()
        RECORD.ended()
