"""Keep an adapter's record of its rank, as our own loop does.

Begun with training, so that a script is watched from then on; calls before that do nothing. The
launcher reads it; under torchrun the watchdog in the process does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final, SupportsFloat

from ddpjob_trainer.environment import read_worker
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.hang import watch
from ddpjob_trainer.liveness.heartbeat import Activity, RankStateWriter
from ddpjob_trainer.liveness.step_times import StepAccount

#: Reading a loss makes the host wait for a GPU.
_LOSS_SECONDS: Final = 1.0


class Record:
    """This rank's record."""

    def __init__(self) -> None:
        self._writer: RankStateWriter | None = None
        self._account: StepAccount | None = None  # of all runs of this process

    def begin(self, *, step: int = 0, total_steps: int = 0) -> None:
        """Start after ``step`` steps. ``total_steps`` 0: unknown.

        Raises ConfigError for contradictions in the environment.
        """
        env = read_worker(os.environ)
        self._main = env.rank == 0
        self._pid = os.getpid()
        self._loss_at = 0.0
        self._first = True
        self._account = self._account or StepAccount(env.reached)
        self._last = self._since = time.monotonic()
        self._activity: Activity = "data"
        stacks.enable(env.state_dir, env.rank)  # before the record, whose existence announces it
        self._writer = RankStateWriter(env.state_dir, env.rank)
        self._writer.spent(self._account.sums)
        self._writer.update(step=step, total_steps=total_steps)
        if env.watch:
            watch(self._writer, env.deadlines)

    @property
    def begun(self) -> bool:
        """Return whether training has begun."""
        return self._writer is not None

    def at(self, activity: Activity) -> None:
        """Mark this rank's activity from now on; this is a sign of life."""
        # A data loader's worker is no rank.
        if self._writer is not None and self._account is not None and os.getpid() == self._pid:
            now = time.monotonic()
            self._account.passed(self._activity, now - self._since)
            self._activity, self._since = activity, now
            self._writer.mark(activity, now)

    def stepped(self, step: int, loss: SupportsFloat | None = None) -> None:
        """Record ``step`` finished optimizer steps; read a loss now and then."""
        if self._writer is None or self._account is None:
            return
        self._first = False
        self.at(self._activity)
        now = self._since
        self._writer.spent(self._account.stepped(step, now - self._last, now))
        self._last = now
        if loss is not None and now - self._loss_at >= _LOSS_SECONDS:
            self._loss_at = now
            self.add_loss(loss)
        self._update("data", phase="step", step=step)

    def add_loss(self, loss: SupportsFloat) -> None:
        """Record the loss that the script logs."""
        if self._writer is not None:
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it may be anything
                self._writer.update(loss=float(loss))

    def saving(self) -> None:
        """Record that a checkpoint is being written, which has another deadline."""
        self._update("snapshot", phase="snapshot")

    def saved(self, step: int) -> None:
        """Record the checkpoint after ``step`` steps as written; it counts as progress."""
        if self.begun:
            more = {"snapshot_step": step} if self._main else {}  # others may be done before it is
            self._update("data", phase="startup" if self._first else "step", **more)

    def failed(self, exception: BaseException) -> None:
        """Record the exception that ends training."""
        if self._writer is not None:
            self._writer.failed(exception)

    def ended(self) -> None:
        """Record the end of training; the watchdog stops."""
        self._update("end", phase="done")

    def _update(self, activity: Activity, **fields: Any) -> None:
        if self._writer is not None:
            self._writer.update(**fields)
            self.at(activity)


#: This process's.
RECORD: Final = Record()


def marks(activity: Activity) -> Callable[..., None]:
    """Return a callback's method that marks an activity."""
    return lambda *_, **__: RECORD.at(activity)


def forward_begins(*_: object) -> None:
    """Mark a model's forward; a module's function, so that models can be pickled."""
    RECORD.at("forward")


def forward_ends(*_: object) -> None:
    """Mark the backward pass that follows, in which ranks wait for one another."""
    RECORD.at("backward")
