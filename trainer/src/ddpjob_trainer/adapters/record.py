"""Keep an adapter's record of its rank, as our own loop does.

Made when training begins, so that a script is watched from then on. The launcher reads it; under
torchrun the watchdog in the process does.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final, SupportsFloat

from ddpjob_trainer.environment import read_worker
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.heartbeat import Activity, RankStateWriter
from ddpjob_trainer.liveness.watchdog import Watchdog

#: Reading a loss makes the host wait for a GPU.
_LOSS_SECONDS: Final = 1.0


class Record:
    """This rank's record. Raises ConfigError for contradictions in the environment."""

    def __init__(self, *, step: int = 0, total_steps: int = 0) -> None:
        env = read_worker(os.environ)
        self._main = env.rank == 0
        self._pid = os.getpid()
        self._loss_at = 0.0
        self._first = True
        stacks.enable(env.state_dir, env.rank)  # before the record, whose existence announces it
        self._writer = RankStateWriter(env.state_dir, env.rank)
        self._writer.update(step=step, total_steps=total_steps)
        if env.watch:
            Watchdog(self._writer, env.deadlines).start()

    def at(self, activity: Activity) -> None:
        """Mark this rank's activity from now on; this is a sign of life."""
        if os.getpid() == self._pid:  # a data loader's worker is no rank
            self._writer.mark(activity)

    def stepped(self, step: int, loss: SupportsFloat | None = None) -> None:
        """Record ``step`` finished optimizer steps; read a loss now and then."""
        self._first = False
        now = time.monotonic()
        if loss is not None and now - self._loss_at >= _LOSS_SECONDS:
            self._loss_at = now
            self.told(loss)
        self._writer.update(phase="step", step=step)
        self.at("data")

    def told(self, loss: SupportsFloat) -> None:
        """Record the loss that the script logs."""
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a script may log anything
            self._writer.update(loss=float(loss))

    def saving(self) -> None:
        """Record that a checkpoint is being written, which has another deadline."""
        self._writer.update(phase="snapshot")
        self.at("snapshot")

    def saved(self, step: int) -> None:
        """Record the checkpoint after ``step`` steps as written; it counts as progress."""
        self._writer.update(
            phase="startup" if self._first else "step",
            snapshot_step=step if self._main else None,  # other ranks may be done before it is
        )
        self.at("data")

    def failed(self, exception: BaseException) -> None:
        """Record the exception that ends training."""
        self._writer.failed(exception)

    def ended(self) -> None:
        """Record the end of training; the watchdog stops."""
        self._writer.update(phase="done")


_record: Record | None = None


def begin(*, step: int = 0, total_steps: int = 0) -> Record:
    """Start this process's record after ``step`` steps. ``total_steps`` 0: unknown."""
    global _record
    _record = Record(step=step, total_steps=total_steps)
    return _record


def forward_begins(*_: object) -> None:
    """Mark a model's forward; a module's function, so that models can be pickled."""
    if _record is not None:
        _record.at("forward")


def forward_ends(*_: object) -> None:
    """Mark the backward pass that follows, in which ranks wait for one another."""
    if _record is not None:
        _record.at("backward")
