"""Finished steps whose losses are still on their way from the device.

To wait for a step that a GPU has just been given would be to leave it without work. So what was
measured in a step is heard when the next one has been queued, or sooner where something rests on
it.
"""

from __future__ import annotations

from collections import deque

from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.step import Step
from ddpjob_trainer.training.step_exchange import StepExchange


class DeferredResults:
    """One process's side; on a CPU no step is ever left. Every rank makes the same calls."""

    def __init__(self, process: RunContext, exchange: StepExchange) -> None:
        self._ahead = 1 if process.world.accelerator.queues else 0
        self._exchange = exchange
        self._recorder = process.recorder
        self._progress = process.progress
        self._replay = process.replay
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """A step has ended."""
        self._steps.append(step)

    def learn(self, *, all_steps: bool) -> None:
        """Hear of those that are likely to be known, or wait for all; tell of them.

        Raises DivergedError and ConfigError where the ranks do not agree.
        """
        ahead = 0 if all_steps else self._ahead
        while len(self._steps) > ahead:
            step = self._steps.popleft()
            loss = self._exchange.learn(step)
            self._replay.known()
            self._recorder.stepped(step.index + 1, step.losses)
            self._progress.stepped(step.index + 1, loss)

    def check_finite(self, newest: Step | None) -> None:
        """Wait for all, and for the step under way; tell nobody. Raises DivergedError."""
        if self._ahead:
            for step in (*self._steps, *([newest] if newest is not None else [])):
                if step.committed:
                    self._exchange.check_finite(step)
