"""A device that does its work later: what is asked of a GPU, on the CPU.

It computes at once, as a CPU does. What travels between it and the host is on its way until
somebody waits: a number read too early is NaN, a batch used too early is NaN, too. Each wait is
counted, and how much was queued behind what was waited for: nothing means that a GPU would have
stood still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.gpu.accelerator import Accelerator, Number, Reading


class Queued(Accelerator):
    """One per process, as accelerator.of() gives it."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._jobs: list[Callable[[], object]] = []
        self._done = 0
        self.waits: list[int] = []  # jobs and marks behind what was waited for
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    # --- The queue -----------------------------------------------------------------------

    def _queue(self, job: Callable[[], object]) -> int:
        self._jobs.append(job)
        return len(self._jobs)

    def run(self, until: int) -> None:
        """Do the work up to there."""
        if until > self._done:
            self.waits.append(len(self._jobs) - until)
        while self._done < until:
            self._jobs[self._done]()
            self._done += 1

    def mark(self) -> Any:
        return _Mark(self, self._queue(lambda: None))

    def is_done(self, place: int) -> bool:
        return place <= self._done

    # --- Results -------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> Number:
        return tensor.detach().view(()).to(torch.float64, copy=True)

    def numbers(self, values: Sequence[Number]) -> torch.Tensor:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])

    def read(self, vector: torch.Tensor, work: Any = None) -> Reading:
        host = torch.full_like(vector, torch.nan)

        def arrive() -> None:
            if work is not None:
                work.wait()
            host.copy_(vector)

        return _Later(host, self, self._queue(arrive))

    # --- Memory --------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        self._arriving = []
        yield
        for there, source in self._arriving:
            there.copy_(source)
        self._arriving = None

    def loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._arriving is not None, "outside of loading()"
        odd = torch.nan if tensor.is_floating_point() else 0
        there = torch.full_like(tensor, odd)
        self._arriving.append((there, tensor))
        return there

    @contextlib.contextmanager
    def saving(self, ready: Any) -> Iterator[None]:
        assert ready is not None, "a copy must begin where the state is complete"
        yield


@dataclass(frozen=True)
class _Mark:
    """An event, between which and another a second passes for each job."""

    device: Queued
    place: int

    def query(self) -> bool:
        return self.device.is_done(self.place)

    def elapsed_time(self, end: _Mark) -> float:
        return 1000.0 * (end.place - self.place)


class _Later(Reading):
    def __init__(self, host: torch.Tensor, device: Queued, place: int) -> None:
        super().__init__(host)
        self._device = device
        self._place = place

    def values(self) -> list[float]:
        self._device.run(self._place)
        return super().values()
