"""Write TensorBoard files, as a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Scalars over steps, in files below a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def open(self, step: int) -> None:
        """Hide later steps of an earlier process. Raises ImportError, OSError."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("the package is missing; pip install tensorboard") from error
        self._writer = SummaryWriter(self._directory, purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one value per name, flushed at once, since a kill comes without notice."""
        assert self._writer is not None, "open() comes first"
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
