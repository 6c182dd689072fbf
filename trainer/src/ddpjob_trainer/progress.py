"""What people and machines see of a run: a line every few steps, the rank's record, metrics."""

from __future__ import annotations

import time

from ddpjob_trainer.metrics import Metrics
from ddpjob_trainer.rankstate import Phase, RankStateWriter


class Progress:
    """Told by the run what happens; publishes it."""

    def __init__(
        self,
        rank: int,
        writer: RankStateWriter,
        *,
        total_steps: int,
        global_batch: int,
        log_every: int,
        samples_per_step: int,
    ) -> None:
        self._rank = rank
        self._writer = writer
        self._metrics = Metrics(rank)
        self._total = total_steps
        self._global_batch = global_batch
        self._samples = samples_per_step
        self._log_every = log_every
        self._mark = (0, 0.0)  # step and time of the last line
        self._last = 0.0
        writer.update(total_steps=total_steps)

    def phase(self, phase: Phase) -> None:
        """Tell what this rank is doing."""
        self._writer.update(phase=phase)

    def resumed(self, step: int) -> None:
        """Training goes on after ``step`` finished steps."""
        now = time.perf_counter()
        self._mark = (step, now)
        self._last = now
        self._writer.update(phase="step", step=step)

    def stepped(self, step: int, loss: float) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self._metrics.step(step, loss, self._samples, now - self._last)
        self._last = now
        changes: dict[str, object] = {"step": step, "loss": loss}
        if step % self._log_every == 0 or step == self._total:
            since, moment = self._mark
            rate = (step - since) * self._global_batch / max(now - moment, 1e-9)
            changes["samples_per_second"] = rate
            self._mark = (step, now)
            if self._rank == 0:
                self._line(step, loss, rate)
        self._writer.update(**changes)

    def _line(self, step: int, loss: float, rate: float) -> None:
        snapshot = self._writer.state.snapshot_step
        tail = f" snapshot {snapshot}" if snapshot >= 0 else ""
        print(f"step {step}/{self._total} loss {loss:.4f} {rate:,.0f} samples/s{tail}", flush=True)

    def saved(self, step: int) -> None:
        """A snapshot is known to be durable."""
        self._writer.update(snapshot_step=step)
        self._metrics.snapshot(step)

    def save_took(self, seconds: float) -> None:
        """A snapshot was written by this rank."""
        self._metrics.snapshot_took(seconds)

    def save_failed(self) -> None:
        """A snapshot could not be written."""
        self._metrics.snapshot_failed()
