"""TensorBoard, when it is installed and asked for. Rank 0 writes, every log_every steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddpjob_trainer.telemetry.console import say

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Scalars over steps. Without a directory, or without the package, it writes nothing."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def begin(self, step: int) -> None:
        """Training goes on after ``step``: later values of the last process are hidden."""
        if self._directory is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            say(0, "no TensorBoard log: the package is missing; pip install tensorboard")
            return
        try:
            self._writer = SummaryWriter(self._directory, purge_step=step + 1)
        except OSError as error:
            say(0, f"no TensorBoard log: {self._directory}: {error.strerror}")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """One value per name."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is queued. Safe to repeat."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
